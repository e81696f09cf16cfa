/* Node: stopped where its main function hands a complete environment to LoadEnvironment, which runs the first line of
 * JavaScript that depends on the program. Nine tenths of its start are over by then.
 *
 * It has threads by then and cannot be a template. It can before it makes the first of its event loops and threads, when
 * its libraries, OpenSSL and the certificates of NODE_EXTRA_CA_CERTS are ready; from there its copies go on by themselves.
 *
 * The first bytes of both functions lead here and are put back before Node goes on. What Node has kept of its arguments by
 * then are a few std::string with the placeholder, found by looking for it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "../raw.h"
#include "loader.h"

enum { MAX_REGIONS = 512, MAX_PLACES = 64, MAX_BUFFERS = 64, MAX_CANDIDATES = 8192, PAGE = 4096, LARGEST_REGION = 4 << 20 };

/* libstdc++'s; one that is longer than 15 bytes keeps them elsewhere. */
struct string { char *bytes; size_t length, capacity; };

static struct string *strings[MAX_PLACES];
static int string_count;

/* Values that count from the start of the process. */
enum unit { NANOSECONDS, NANOSECONDS_FLOATING, MICROSECONDS_FLOATING, MILLISECONDS };
static struct origin { void *place; enum unit unit; } origins[MAX_PLACES];
static int origin_count;

static void *(*new_memory)(size_t);
static void (*delete_memory)(void *);
static void *(*default_loop)(void);
static void (*update_time)(void *);
static uint64_t (*loop_now)(const void *);
static uint64_t (*environment_now)(void *);
static size_t (*usable_size)(void *);
static uint64_t *node_start, *process_start, *engine_start;
static double *start_timestamp;

#if defined(__x86_64__)
enum { DETOUR = 14 };
#else
enum { DETOUR = 16 };
#endif
static struct stop { uint8_t *target, original[DETOUR]; bool set; } first_loop, environment_made;

/* Finding --------------------------------------------------------------------------------------------------------- */

static void add_origin(void *place, enum unit unit)
{
    if (origin_count == MAX_PLACES)
        give_up();
    origins[origin_count++] = (struct origin){place, unit};
}

static struct region regions[MAX_REGIONS];
static int region_count;

/* The heap and the program's data, and the arenas that malloc takes something from now and then. Threads' stacks, which are
 * larger, are left alone: to read them all would make memory of them. */
static void find_regions(void)
{
    struct region every[MAX_REGIONS];
    region_count = list_regions(regions, MAX_REGIONS, false);
    int count = list_regions(every, MAX_REGIONS, true);
    for (int i = 0; i < count && region_count < MAX_REGIONS; i++)
        if (every[i].end - every[i].start <= LARGEST_REGION && !in_regions(regions, region_count, every[i].start, 1))
            regions[region_count++] = every[i];
    if (count == MAX_REGIONS || region_count == MAX_REGIONS)
        give_up();
}

static uint64_t bits(double value)
{
    uint64_t pattern;
    memcpy(&pattern, &value, sizeof pattern);
    return pattern;
}

/* Words of that memory that may be part of what is looked for. All of it is read once, and most of it is nothing. */
static uint64_t *candidates[MAX_CANDIDATES];
static int candidate_count;

static void find_candidates(void)
{
    uint64_t text, length = strlen(placeholder), start = *process_start, as_double = bits((double)start);
    uint64_t node = *node_start, engine = *engine_start, stamp = bits(*start_timestamp);
    memcpy(&text, placeholder, sizeof text);
    for (int i = 0; i < region_count; i++) {
        uint64_t *end = (uint64_t *)(regions[i].end & ~(uintptr_t)7);
        for (uint64_t *word = (uint64_t *)((regions[i].start + 7) & ~(uintptr_t)7); word < end; word++) {
            uint64_t value = *word;
            if (value != text && value != length && value != start && value != as_double && value != node && value != engine &&
                value != stamp)
                continue;
            /* A string's capacity follows its length, which many other words are equal to. */
            if (value == length && (word + 1 == end || word[1] < length || word[1] > 4 * length))
                continue;
            if (candidate_count == MAX_CANDIDATES)
                give_up();
            candidates[candidate_count++] = word;
        }
    }
}

/* Whether so many bytes around a candidate belong to the memory that is looked at. */
static bool reaches(const uint64_t *candidate, size_t before, size_t after)
{
    return in_regions(regions, region_count, (uintptr_t)candidate - before, before + after);
}

static void find_strings(void)
{
    uintptr_t buffers[MAX_BUFFERS];
    int buffer_count = 0;
    size_t length = strlen(placeholder);
    for (int i = 0; i < candidate_count; i++) {
        uintptr_t at = (uintptr_t)candidates[i];
        /* What malloc gives is aligned to 16. */
        if (at % 16 == 0 && reaches(candidates[i], 0, length + 1) && memcmp((const char *)at, placeholder, length + 1) == 0) {
            if (buffer_count == MAX_BUFFERS)
                give_up();
            buffers[buffer_count++] = at;
        }
    }
    for (int i = 0; i < candidate_count; i++) {
        if (*candidates[i] != length || !reaches(candidates[i], 8, 16))
            continue;
        struct string *s = (struct string *)(candidates[i] - 1);
        for (int k = 0; k < buffer_count; k++)
            if ((uintptr_t)s->bytes == buffers[k]) {
                if (string_count == MAX_PLACES)
                    give_up();
                strings[string_count++] = s;
            }
    }
    /* The option and the argument at least, and none of which it is not known whose it is. */
    if (string_count < 2 || string_count != buffer_count)
        give_up();
}

static bool find_milestones(void)
{
    uint64_t start = *process_start, as_double = bits((double)start), stamp = bits(*start_timestamp);
    bool found = false;
    if (!start || *start_timestamp <= 0 || !*node_start || !*engine_start)
        give_up();
    for (int i = 0; i < candidate_count; i++) {
        uint64_t *word = candidates[i];
        if (*word == start || *word == *node_start || *word == *engine_start) {
            add_origin(word, NANOSECONDS);
        } else if (*word == as_double) {
            add_origin(word, NANOSECONDS_FLOATING);
            found = true;
            /* The milestones: the origin's time of day, the origin, when the environment was made, and so on. */
            if (reaches(word, 8, 32) && word[-1] == stamp)
                for (int k = 1; k < 4; k++)
                    if (word[k] > as_double && word[k] < bits((double)start + 60e9))
                        add_origin(&word[k], NANOSECONDS_FLOATING);
        } else if (*word == stamp) {
            add_origin(word, MICROSECONDS_FLOATING);
        }
    }
    return found;
}

static void find_origins(uint8_t *environment)
{
    if (!find_milestones())
        give_up();
    /* When timers began to count. */
    uint64_t since = environment_now(environment), base = loop_now(default_loop()) - since;
    int bases = 0;
    for (size_t at = 0; at + 8 <= usable_size(environment); at += 8)
        if (memcmp(environment + at, &base, 8) == 0) {
            add_origin(environment + at, MILLISECONDS);
            bases++;
        }
    if (bases != 1)
        give_up();
}

/* Changing -------------------------------------------------------------------------------------------------------- */

static void set_code(const struct task *task)
{
    for (int i = 0; i < string_count; i++) {
        char *bytes = new_memory(task->code_length + 1);
        if (!bytes)
            give_up();
        memcpy(bytes, task->code, task->code_length + 1);
        if (task->code_length <= 15) {
            /* A short one is kept where its capacity would be. */
            struct { char *bytes; size_t length; char text[16]; } *brief = (void *)strings[i];
            delete_memory(brief->bytes);
            delete_memory(bytes);
            memcpy(brief->text, task->code, task->code_length + 1);
            brief->bytes = brief->text;
            brief->length = task->code_length;
            continue;
        }
        delete_memory(strings[i]->bytes);
        *strings[i] = (struct string){bytes, task->code_length, task->code_length};
    }
}

static int64_t monotonic(void)
{
    struct timespec t;
    raw(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* As if the process had started as much later as it has waited. */
static void shift_origins(int64_t waited)
{
    for (int i = 0; i < origin_count; i++) {
        uint64_t *count = origins[i].place;
        double *value = origins[i].place;
        switch (origins[i].unit) {
        case NANOSECONDS: *count += (uint64_t)waited; break;
        case NANOSECONDS_FLOATING: *value += (double)waited; break;
        case MICROSECONDS_FLOATING: *value += (double)waited / 1e3; break;
        case MILLISECONDS: *count += (uint64_t)(waited / 1000000); break;
        }
    }
    update_time(default_loop());
}

/* The detour ------------------------------------------------------------------------------------------------------ */

static void write_code(uint8_t *target, const uint8_t *bytes)
{
    uintptr_t page = (uintptr_t)target & ~(uintptr_t)(PAGE - 1);
    size_t size = (((uintptr_t)target + DETOUR + PAGE - 1) & ~(uintptr_t)(PAGE - 1)) - page;
    if (raw(SYS_mprotect, page, size, PROT_READ | PROT_WRITE | PROT_EXEC) < 0)
        give_up();
    memcpy(target, bytes, DETOUR);
    if (raw(SYS_mprotect, page, size, PROT_READ | PROT_EXEC) < 0)
        give_up();
#if defined(__aarch64__)
    for (uintptr_t at = (uintptr_t)target & ~15ul; at < (uintptr_t)target + DETOUR; at += 4)
        __asm__ volatile("dc cvau, %0" ::"r"(at) : "memory");
    __asm__ volatile("dsb ish" ::: "memory");
    for (uintptr_t at = (uintptr_t)target & ~15ul; at < (uintptr_t)target + DETOUR; at += 4)
        __asm__ volatile("ic ivau, %0" ::"r"(at) : "memory");
    __asm__ volatile("dsb ish\n\tisb" ::: "memory");
#endif
}

static void go_on(struct stop *stop)
{
    if (stop->set)
        write_code(stop->target, stop->original);
    stop->set = false;
}

/* Called instead of uv_loop_init, which is then called after all. */
__attribute__((used)) static void *prepare(void)
{
    static const struct fork_steps steps = {.goes_on = true};
    static const char *const files[] = {"NODE_EXTRA_CA_CERTS", "OPENSSL_CONF"};
    int64_t arrived = monotonic();
    go_on(&first_loop);
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (getenv(files[i]))
            watch_path(getenv(files[i]));
    expect_most_files();
    become_template(&steps);
    uint64_t waited = (uint64_t)(monotonic() - arrived);
    *node_start += waited;
    *process_start += waited;
    *start_timestamp += (double)waited / 1e3;
    return first_loop.target;
}

/* Called instead of LoadEnvironment, which is then called after all. */
__attribute__((used)) static void *arrive(uint8_t *environment)
{
    int64_t arrived = monotonic();
    struct task task;
    go_on(&first_loop); /* a version that makes its loops later is no template */
    go_on(&environment_made);
    find_regions();
    find_candidates();
    find_strings();
    find_origins(environment);
    wait_for_task(&task);
    set_code(&task);
    shift_origins(monotonic() - arrived);
    take_task(&task);
    return environment_made.target;
}

/* They keep the arguments, call the function above, and jump to where it says. */
void prepare_detour(void), arrive_detour(void);
#if defined(__x86_64__)
#define DETOUR_TO(name)                                                                                                     \
    __asm__(".text\n.globl " #name "_detour\n.hidden " #name "_detour\n" #name "_detour:\n\t"                                \
            "push %rdi\n\tpush %rsi\n\tpush %rdx\n\tpush %rcx\n\tpush %r8\n\tpush %r9\n\tsub $8, %rsp\n\t"                    \
            "call " #name "\n\t"                                                                                            \
            "add $8, %rsp\n\tpop %r9\n\tpop %r8\n\tpop %rcx\n\tpop %rdx\n\tpop %rsi\n\tpop %rdi\n\t"                          \
            "jmp *%rax\n")
#else
#define DETOUR_TO(name)                                                                                                     \
    __asm__(".text\n.globl " #name "_detour\n.hidden " #name "_detour\n" #name "_detour:\n\t"                                \
            "stp x29, x30, [sp, #-96]!\n\tstp x0, x1, [sp, #16]\n\tstp x2, x3, [sp, #32]\n\tstp x4, x5, [sp, #48]\n\t"       \
            "stp x6, x7, [sp, #64]\n\tstr x8, [sp, #80]\n\t"                                                               \
            "bl " #name "\n\t"                                                                                              \
            "mov x16, x0\n\t"                                                                                              \
            "ldp x0, x1, [sp, #16]\n\tldp x2, x3, [sp, #32]\n\tldp x4, x5, [sp, #48]\n\tldp x6, x7, [sp, #64]\n\t"           \
            "ldr x8, [sp, #80]\n\tldp x29, x30, [sp], #96\n\tbr x16\n")
#endif
DETOUR_TO(prepare);
DETOUR_TO(arrive);

static bool find(void *pointer, const char *name)
{
    void *symbol = find_symbol(name);
    memcpy(pointer, &symbol, sizeof symbol);
    return symbol;
}

static void stop_at(struct stop *stop, void (*detour)(void))
{
    uint8_t bytes[DETOUR];
    void *place = (void *)(uintptr_t)detour;
#if defined(__x86_64__)
    static const uint8_t jump[] = {0xff, 0x25, 0, 0, 0, 0}; /* jmp *0(%rip) */
#else
    static const uint8_t jump[] = {0x50, 0, 0, 0x58, 0, 2, 0x1f, 0xd6}; /* ldr x16, #8; br x16 */
#endif
    memcpy(stop->original, stop->target, DETOUR);
    memcpy(bytes, jump, sizeof jump);
    memcpy(bytes + sizeof jump, &place, sizeof place);
    write_code(stop->target, bytes);
    stop->set = true;
}

bool prepare_node(void)
{
    if (!find(&environment_made.target,
              "_ZN4node15LoadEnvironmentEPNS_11EnvironmentESt8functionIFN2v810MaybeLocalINS3_5ValueEEERKNS_26"
              "StartExecutionCallbackInfoEEES2_IFvS1_NS3_5LocalIS5_EESD_EE") &&
        !find(&environment_made.target,
              "_ZN4node15LoadEnvironmentEPNS_11EnvironmentESt8functionIFN2v810MaybeLocalINS3_5ValueEEERKNS_26"
              "StartExecutionCallbackInfoEEE"))
        return false;
    if (!find(&first_loop.target, "uv_loop_init") || !find(&new_memory, "_Znwm") || !find(&delete_memory, "_ZdlPv") ||
        !find(&default_loop, "uv_default_loop") || !find(&update_time, "uv_update_time") || !find(&loop_now, "uv_now") ||
        !find(&environment_now, "_ZN4node11Environment12GetNowUint64Ev") || !find(&usable_size, "malloc_usable_size") ||
        !find(&node_start, "_ZN4node11per_process15node_start_timeE") ||
        !find(&process_start, "_ZN4node11performance25performance_process_startE") ||
        !find(&engine_start, "_ZN4node11performance20performance_v8_startE") ||
        !find(&start_timestamp, "_ZN4node11performance35performance_process_start_timestampE"))
        return false;
    stop_at(&first_loop, prepare_detour);
    stop_at(&environment_made, arrive_detour);
    return true;
}
