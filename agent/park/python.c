/* Python: initialised as `python3 -c` does it, stopped before it runs the command. No version's headers are needed: the
 * configuration stays opaque, and where the command is kept in it is found out by looking for the placeholder. */
#define _GNU_SOURCE
#include <string.h>
#include <fcntl.h>
#include <wchar.h>

#include "../raw.h"
#include "loader.h"

typedef struct object object;
typedef long pysize;
struct status { int type; const char *function, *message; int exit_code; }; /* PyStatus */

/* As declared by Python, which keeps them stable. */
#define FUNCTIONS(F) \
    F(void, PyConfig_InitPythonConfig, (void *)) \
    F(struct status, PyConfig_SetBytesArgv, (void *, long, char *const *)) \
    F(struct status, Py_InitializeFromConfig, (const void *)) \
    F(void, PyConfig_Clear, (void *)) \
    F(int, Py_RunMain, (void)) \
    F(const void *, _Py_GetConfig, (void)) \
    F(void, Py_GetArgcArgv, (int *, wchar_t ***)) \
    F(wchar_t *, Py_DecodeLocale, (const char *, size_t *)) \
    F(void *, PyMem_RawMalloc, (size_t)) \
    F(void, PyMem_RawFree, (void *)) \
    F(object *, PySys_GetObject, (const char *)) \
    F(int, PySys_SetObject, (const char *, object *)) \
    F(object *, PyUnicode_FromWideChar, (const wchar_t *, pysize)) \
    F(object *, PyUnicode_FromString, (const char *)) \
    F(object *, PyUnicode_EncodeFSDefault, (object *)) \
    F(char *, PyBytes_AsString, (object *)) \
    F(pysize, PyList_Size, (object *)) \
    F(object *, PyList_GetItem, (object *, pysize)) \
    F(int, PyList_SetItem, (object *, pysize, object *)) \
    F(object *, PyImport_GetModuleDict, (void)) \
    F(int, PyDict_Next, (object *, pysize *, object **, object **)) \
    F(object *, PyDict_GetItemString, (object *, const char *)) \
    F(object *, PyObject_GetAttrString, (object *, const char *)) \
    F(int, PyObject_SetAttrString, (object *, const char *, object *)) \
    F(object *, PyObject_CallMethod, (object *, const char *, const char *, ...)) \
    F(void, PyErr_Clear, (void)) \
    F(void, Py_DecRef, (object *))

#define DECLARE(result, name, parameters) static result (*name) parameters;
FUNCTIONS(DECLARE)
static object *none, *false_;

static struct fork_steps fork_steps; /* as os.fork has them */

enum { CONFIG_ROOM = 16384, CONFIG_SEARCHED = 2048, MAX_REGIONS = 256 };

bool prepare_python(void)
{
#define FIND(result, name, parameters) \
    do { \
        void *symbol = find_symbol(#name); \
        if (!symbol) \
            return false; \
        memcpy(&name, &symbol, sizeof symbol); \
    } while (0);
    FUNCTIONS(FIND)
    static const char *const names[] = {"PyOS_BeforeFork", "PyOS_AfterFork_Parent", "PyOS_AfterFork_Child"};
    void (**steps[])(void) = {&fork_steps.before, &fork_steps.in_parent, &fork_steps.in_child};
    for (int i = 0; i < 3; i++) {
        void *symbol = find_symbol(names[i]);
        memcpy(steps[i], &symbol, sizeof symbol);
    }
    none = find_symbol("_Py_NoneStruct");
    false_ = find_symbol("_Py_FalseStruct");
    return none && false_;
}

/* What start-up depended on --------------------------------------------------------------------------------------- */

/* Calls with the name of a path object; anything else is passed over. */
static void watch_object(object *path, void (*watch)(const char *))
{
    object *bytes = path && path != none ? PyUnicode_EncodeFSDefault(path) : NULL;
    const char *name = bytes ? PyBytes_AsString(bytes) : NULL;
    if (name && name[0] == '/')
        watch(name);
    if (bytes)
        Py_DecRef(bytes);
    PyErr_Clear();
}

static void watch_attribute(object *holder, const char *name, void (*watch)(const char *))
{
    object *value = PyObject_GetAttrString(holder, name);
    watch_object(value, watch);
    if (value)
        Py_DecRef(value);
    PyErr_Clear();
}

struct entry { uint64_t inode, offset; uint16_t length; uint8_t type; char name[]; };

static bool has_own_code; /* some that is not the system's was run: it may depend on more than the files that are watched */

/* The system's, or put there by k8e. */
static bool is_of_system(const char *path)
{
    const char *slash = strrchr(path, '/');
    return strncmp(path, "/usr/", 5) == 0 || (slash && strncmp(slash + 1, "k8e_", 4) == 0);
}

/* Whether a .pth file has lines that are run. */
static bool has_code(const char *path)
{
    static const char word[] = "import";
    char text[1024];
    size_t same = 0; /* of the line's beginning and the word; more: this line is another */
    bool found = false;
    long fd = raw(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0), count = 0;
    while (fd >= 0 && !found && (count = raw(SYS_read, fd, text, sizeof text)) > 0)
        for (long i = 0; i < count && !found; i++) {
            found = same == sizeof word - 1 && (text[i] == ' ' || text[i] == '\t');
            bool new_line = ((unsigned char)text[i] < ' ' && text[i] != '\t') || (text[i] & 0x80); /* or a mark in front of one */
            same = new_line ? 0 : same < sizeof word - 1 && text[i] == word[same] ? same + 1 : sizeof word;
        }
    if (fd >= 0)
        raw(SYS_close, fd);
    return found;
}

/* The .pth files of a directory: they are read at start-up, and may run code. */
static void watch_configuration(const char *directory)
{
    char entries[8192] __attribute__((aligned(8)));
    char path[8192];
    size_t length = strlen(directory);
    long fd = raw(SYS_openat, AT_FDCWD, directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), count;
    if (fd < 0)
        return;
    while ((count = raw(SYS_getdents64, fd, entries, sizeof entries)) > 0)
        for (long at = 0; at < count;) {
            struct entry *e = (struct entry *)(void *)(entries + at);
            size_t size = strlen(e->name);
            at += e->length;
            if (size < 4 || strcmp(e->name + size - 4, ".pth") != 0 || length + size + 2 > sizeof path)
                continue;
            memcpy(path, directory, length);
            path[length] = '/';
            memcpy(path + length + 1, e->name, size + 1);
            watch_loaded(path);
            has_own_code = has_own_code || (!is_of_system(path) && has_code(path));
        }
    raw(SYS_close, fd);
}

static void watch_parents(void)
{
    /* Beside the executable or one above it pyvenv.cfg makes a virtual environment. */
    object *bytes = PyUnicode_EncodeFSDefault(PySys_GetObject("executable"));
    const char *name = bytes ? PyBytes_AsString(bytes) : NULL;
    char path[4096 + 16];
    for (int level = 0; name && level < 2; level++) {
        size_t length = strlen(name);
        if (length >= 4096)
            give_up();
        if (level == 0)
            memcpy(path, name, length + 1);
        char *slash = strrchr(path, '/');
        if (!slash)
            break;
        memcpy(slash, "/pyvenv.cfg", sizeof "/pyvenv.cfg");
        watch_path(path);
        *slash = 0;
    }
    if (bytes)
        Py_DecRef(bytes);
    PyErr_Clear();
}

static void watch_start(void)
{
    watch_parents();
    object *places = PySys_GetObject("path");
    for (pysize i = 0; places && i < PyList_Size(places); i++) {
        object *bytes = PyUnicode_EncodeFSDefault(PyList_GetItem(places, i));
        if (bytes) {
            watch_path(PyBytes_AsString(bytes));
            watch_configuration(PyBytes_AsString(bytes));
            Py_DecRef(bytes);
        }
        PyErr_Clear();
    }
    object *modules = PyImport_GetModuleDict(), *name, *module;
    for (pysize at = 0; PyDict_Next(modules, &at, &name, &module);) {
        watch_attribute(module, "__file__", watch_loaded);
        watch_attribute(module, "__cached__", watch_loaded);
    }
    object *site = PyDict_GetItemString(modules, "site");
    if (site) {
        watch_attribute(site, "USER_SITE", watch_path); /* which is passed over as long as it does not exist */
        watch_attribute(site, "USER_BASE", watch_path);
    }
}

/* Children -------------------------------------------------------------------------------------------------------- */

/* Modules that do not come with Python may keep what must not be the same in two processes, such as the state of a random
 * generator, or depend on what has changed since. The system's own, for which that is known, may be there, but those in C. */
static bool has_other_modules(void)
{
    object *modules = PyImport_GetModuleDict(), *name, *module, *os = PyDict_GetItemString(modules, "os");
    object *library = os ? PyObject_GetAttrString(os, "__file__") : NULL;
    object *base = library ? PyUnicode_EncodeFSDefault(library) : NULL;
    const char *own = base ? PyBytes_AsString(base) : NULL, *slash = own ? strrchr(own, '/') : NULL;
    bool found = !slash || !fork_steps.in_child;
    for (pysize at = 0; !found && PyDict_Next(modules, &at, &name, &module);) {
        object *file = PyObject_GetAttrString(module, "__file__");
        object *bytes = file && file != none ? PyUnicode_EncodeFSDefault(file) : NULL;
        const char *path = bytes ? PyBytes_AsString(bytes) : NULL;
        size_t length = path ? strlen(path) : 0;
        found = path && strncmp(path, own, (size_t)(slash + 1 - own)) != 0 &&
                (!is_of_system(path) || (length > 3 && strcmp(path + length - 3, ".so") == 0));
        if (bytes)
            Py_DecRef(bytes);
        if (file)
            Py_DecRef(file);
        PyErr_Clear();
    }
    if (base)
        Py_DecRef(base);
    if (library)
        Py_DecRef(library);
    return found;
}

/* The command ----------------------------------------------------------------------------------------------------- */

/* Where the configuration keeps the command: the one word that points to the placeholder and a new line. */
static wchar_t **find_command(void)
{
    struct region regions[MAX_REGIONS];
    int count = list_regions(regions, MAX_REGIONS, true);
    size_t length = strlen(placeholder);
    uintptr_t *words = (uintptr_t *)(uintptr_t)_Py_GetConfig();
    wchar_t **found = NULL;
    for (size_t i = 0; i < CONFIG_SEARCHED / sizeof *words; i++) {
        if (words[i] % sizeof(wchar_t) || !in_regions(regions, count, words[i], (length + 2) * sizeof(wchar_t)))
            continue;
        const wchar_t *text = (const wchar_t *)words[i];
        size_t same = 0;
        while (same < length && text[same] == (wchar_t)placeholder[same])
            same++;
        if (same < length || text[length] != '\n' || text[length + 1])
            continue;
        if (found)
            give_up();
        found = (wchar_t **)(void *)&words[i];
    }
    if (!found)
        give_up();
    return found;
}

static wchar_t *copy_text(const wchar_t *text, size_t length, bool new_line)
{
    wchar_t *copy = PyMem_RawMalloc((length + 2) * sizeof *copy);
    if (!copy)
        give_up();
    memcpy(copy, text, length * sizeof *copy);
    if (new_line)
        copy[length++] = '\n';
    copy[length] = 0;
    return copy;
}

static void set_command(wchar_t **command, const char *code)
{
    size_t length;
    wchar_t *text = Py_DecodeLocale(code, &length), **words;
    int count;
    object *list = PySys_GetObject("orig_argv");
    Py_GetArgcArgv(&count, &words);
    if (!text || !list || PyList_Size(list) != 3 || count != 3)
        give_up();
    PyMem_RawFree(*command);
    *command = copy_text(text, length, true);
    PyMem_RawFree(words[2]);
    words[2] = copy_text(text, length, false);
    object *shown = PyUnicode_FromWideChar(text, (pysize)length);
    if (!shown || PyList_SetItem(list, 2, shown) < 0)
        give_up();
    PyMem_RawFree(text);
}

/* As create_stdio does it. What sys.stdin is like depends on what descriptor 0 is. */
static void renew_stdin(void)
{
    object *io = PyDict_GetItemString(PyImport_GetModuleDict(), "io"), *old = PySys_GetObject("stdin");
    object *encoding = old ? PyObject_GetAttrString(old, "encoding") : NULL;
    object *errors = old ? PyObject_GetAttrString(old, "errors") : NULL;
    if (!io || !encoding || !errors)
        give_up();
    object *buffer = PyObject_CallMethod(io, "open", "isiOOOO", 0, "rb", -1, none, none, none, false_);
    object *file = buffer ? PyObject_GetAttrString(buffer, "raw") : NULL;
    object *name = PyUnicode_FromString("<stdin>"), *mode = PyUnicode_FromString("r");
    if (!file || !name || !mode || PyObject_SetAttrString(file, "name", name) < 0)
        give_up();
    object *text = PyObject_CallMethod(io, "TextIOWrapper", "OOOsOO", buffer, encoding, errors, "\n", false_, false_);
    if (!text || PyObject_SetAttrString(text, "mode", mode) < 0 || PySys_SetObject("__stdin__", text) < 0 ||
        PySys_SetObject("stdin", text) < 0)
        give_up();
    object *held[] = {encoding, errors, buffer, file, name, mode, text};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_DecRef(held[i]);
}

/* What Python's own main does, with a pause in the middle. */
int python_main(int argc, char **argv, char **envp)
{
    (void)envp;
    static uint64_t config[CONFIG_ROOM / 8];
    PyConfig_InitPythonConfig(config);
    struct status status = PyConfig_SetBytesArgv(config, argc, argv);
    if (status.type == 0)
        status = Py_InitializeFromConfig(config);
    if (status.type != 0)
        give_up();
    PyConfig_Clear(config);
    watch_start();
    wchar_t **command = find_command();
    struct task task;
    if (!has_own_code && !has_other_modules())
        become_template(&fork_steps);
    wait_for_task(&task);
    set_command(command, task.code);
    if (task.no_stdin)
        renew_stdin();
    take_task(&task);
    return Py_RunMain();
}
