/* Rings: see agent.h. Pure bookkeeping but for the mapping of the bytes. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "agent.h"

bool ring_allocate(struct ring *r, uint32_t capacity)
{
    void *bytes = mmap(NULL, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED)
        return false;
    *r = (struct ring){.bytes = bytes, .capacity = capacity};
    return true;
}

void ring_free(struct ring *r)
{
    if (r->bytes)
        munmap(r->bytes, r->capacity);
    r->bytes = NULL;
}

static uint32_t half(const struct ring *r) { return r->capacity / 2; }

/* Where an offset lies, and how many bytes follow it without a wrap. In a split ring the second half is a ring of its own,
 * laid over the same memory from tail_origin on. */
static uint32_t locate(const struct ring *r, uint64_t offset, uint32_t *contiguous)
{
    uint32_t place, run;
    if (r->split && offset >= r->tail_origin) {
        uint32_t index = (uint32_t)((offset - r->tail_origin) % half(r));
        place = (uint32_t)((r->tail_origin % r->capacity + index) % r->capacity);
        run = half(r) - index;
    } else {
        place = (uint32_t)(offset % r->capacity);
        run = r->capacity;
    }
    *contiguous = run < r->capacity - place ? run : r->capacity - place;
    return place;
}

uint32_t ring_room(const struct ring *r)
{
    if (!r->split)
        return r->capacity - (uint32_t)(r->end - r->acked);
    uint64_t first = r->acked > r->tail_start ? r->acked : r->tail_start;
    return half(r) - (uint32_t)(r->end - first);
}

uint32_t ring_space(const struct ring *r, bool may_drop, uint8_t **at)
{
    uint32_t contiguous, room = ring_room(r);
    if (room == 0 && may_drop) {
        room = half(r);
        /* A ring that is about to split writes where its second half begins. */
        if (!r->split) {
            struct ring after = *r;
            after.split = true;
            after.tail_origin = after.tail_start = r->acked + half(r);
            *at = r->bytes + locate(&after, r->end, &contiguous);
            return contiguous < room ? contiguous : room;
        }
    }
    *at = r->bytes + locate(r, r->end, &contiguous);
    return contiguous < room ? contiguous : room;
}

void ring_wrote(struct ring *r, uint32_t count, bool may_drop)
{
    if (count == 0)
        return;
    if (may_drop && !r->split && r->end - r->acked == r->capacity) {
        r->split = true;
        r->tail_origin = r->tail_start = r->acked + half(r);
    }
    r->end += count;
    if (r->split && may_drop && r->end - r->tail_start > half(r))
        r->tail_start = r->end - half(r);
}

uint32_t ring_bytes(const struct ring *r, uint64_t *offset, uint8_t **at)
{
    uint64_t limit = r->end;
    if (r->split) {
        if (*offset >= r->tail_origin && *offset < r->tail_start)
            *offset = r->tail_start;
        if (*offset < r->tail_origin)
            limit = r->tail_origin;
    }
    uint32_t contiguous;
    *at = r->bytes + locate(r, *offset, &contiguous);
    return contiguous < limit - *offset ? contiguous : (uint32_t)(limit - *offset);
}

void ring_ack(struct ring *r, uint64_t offset)
{
    r->acked = offset;
    if (r->acked == r->end)
        r->split = false;
}

void ring_put(struct ring *r, const void *bytes, uint32_t count)
{
    const uint8_t *from = bytes;
    while (count > 0) {
        uint8_t *at;
        uint32_t space = ring_space(r, false, &at);
        uint32_t step = count < space ? count : space;
        memcpy(at, from, step);
        ring_wrote(r, step, false);
        from += step;
        count -= step;
    }
}
