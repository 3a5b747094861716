/* Backend acme: all-reduce of f32 sums on the CPU, through the rendezvous store. Slow and complete: put your library in its place.
 *
 * oxccl_plugin.h says what each function has to do. `make test` holds the plugin to it. */
#define _GNU_SOURCE
#include "oxccl_plugin.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    pthread_mutex_t lock; /* any thread may call; operations run one after the other */
    char prefix[256];
    oxccl_store store; /* a reference is held while has_store */
    int has_store;
    uint64_t seq; /* counts operations */
    /* Read without the lock, which submit holds while it waits. */
    _Atomic uint32_t rank, world;
    _Atomic uint64_t epoch, sent, received;
    atomic_int failed; /* refuses calls until it is configured again; why does not change meanwhile */
    oxccl_fault why;
} group;

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int64_t left(int64_t deadline) {
    int64_t ms = deadline - now_ms();
    return ms > 0 ? ms : 0;
}

static oxccl_fault no_fault(void) {
    oxccl_fault fault;
    memset(&fault, 0, sizeof fault);
    fault.size = sizeof fault;
    return fault;
}

/* ---- what it offers ---- */

static void tell(void *reply_ctx, void (*reply)(void *, const oxccl_capabilities *)) {
    uint32_t reduces[OXCCL_SUM + 1] = {1u << OXCCL_DTYPE_F32};
    oxccl_str cpu = oxccl_text("cpu");
    oxccl_capabilities c;
    memset(&c, 0, sizeof c);
    c.size = sizeof c;
    c.ops = 1u << OXCCL_OP_ALL_REDUCE;
    c.moves = 1u << OXCCL_DTYPE_F32;
    c.reduces = reduces;
    c.reduce_count = OXCCL_SUM + 1;
    c.features = 1u << OXCCL_FEATURE_BITWISE_EQUAL | 1u << OXCCL_FEATURE_THREAD_RANKS;
    c.devices = &cpu;
    c.device_count = 1;
    reply(reply_ctx, &c);
}

static void group_capabilities(void *ctx, void *reply_ctx, void (*reply)(void *, const oxccl_capabilities *)) {
    (void)ctx;
    tell(reply_ctx, reply);
}

static void group_info(void *ctx, void *reply_ctx, void (*reply)(void *, const oxccl_info *)) {
    group *g = ctx;
    oxccl_info i;
    memset(&i, 0, sizeof i);
    i.size = sizeof i;
    i.backend = i.name = oxccl_text("acme");
    i.rank = g->rank;
    i.world_size = g->world;
    i.epoch = g->epoch;
    i.device.kind = oxccl_text("cpu");
    reply(reply_ctx, &i);
}

/* ---- the store: each rank writes its part under a key of its own and reads the others'. The keys stay until the store ends. ---- */

/* A sink that keeps the bytes. */
typedef struct {
    void *to;
    uint64_t room, got;
} part;

static void keep(void *ctx, oxccl_bytes bytes) {
    part *p = ctx;
    p->got = bytes.len;
    if (bytes.len && bytes.len <= p->room)
        memcpy(p->to, bytes.ptr, bytes.len);
}

static void key_of(char *out, size_t size, const group *g, const char *what, uint64_t seq, uint64_t tensor, uint32_t rank) {
    snprintf(out, size, "%s/acme/%llu/%s/%llu/%llu/%u", g->prefix, (unsigned long long)g->epoch, what,
             (unsigned long long)seq, (unsigned long long)tensor, rank);
}

/* Reads what a rank wrote. Only a time-out is worded here: other faults, such as a cancelled configure, pass through. */
static int32_t read_part(group *g, const char *what, uint64_t seq, uint64_t tensor, uint32_t rank, part *p,
                         int64_t deadline, oxccl_fault *fault) {
    char key[512], text[128];
    oxccl_sink sink = {p, keep};
    key_of(key, sizeof key, g, what, seq, tensor, rank);
    int32_t status = g->store.get(g->store.ctx, oxccl_text(key), left(deadline), sink, fault);
    if (status != OXCCL_OK && fault->kind == OXCCL_TIMEOUT) {
        oxccl_fault late = no_fault();
        oxccl_fault_copy(fault, &late);
        fault->peer = rank;
        fault->flags = OXCCL_FAULT_PEER;
        snprintf(text, sizeof text, "waiting for rank %u of %u in phase %s", rank, g->world, what);
        status = oxccl_fail(fault, OXCCL_TIMEOUT, text);
    }
    return status;
}

/* ---- the group ---- */

static int32_t configure(group *g, const oxccl_configuration *c, oxccl_fault *fault) {
    int64_t deadline = now_ms() + c->timeout_ms;
    if (c->prefix.len >= sizeof g->prefix)
        return oxccl_fail(fault, OXCCL_INVALID_ARGUMENT, "the prefix is too long");
    if (g->has_store)
        g->store.release(g->store.ctx);
    memset(g->prefix, 0, sizeof g->prefix);
    memcpy(g->prefix, c->prefix.ptr, c->prefix.len);
    g->seq = 0;
    g->failed = 0;
    g->store = *c->store; /* a copy may be used as long as a reference is held */
    g->store.retain(g->store.ctx);
    g->has_store = 1;
    g->rank = c->rank;
    g->world = c->world_size;
    g->epoch = c->epoch;
    /* All ranks meet, so that one that is missing is found now. A real backend exchanges its addresses here. */
    char key[512];
    oxccl_bytes here = {"here", 4};
    key_of(key, sizeof key, g, "meet", 0, 0, g->rank);
    int32_t status = g->store.set(g->store.ctx, oxccl_text(key), here, left(deadline), fault);
    for (uint32_t r = 0; r < g->world && status == OXCCL_OK; r++) {
        part p = {NULL, 0, 0};
        status = read_part(g, "meet", 0, 0, r, &p, deadline, fault);
    }
    if (status != OXCCL_OK)
        g->rank = g->world = 0; /* not configured */
    return status;
}

static int32_t group_configure(void *ctx, const oxccl_configuration *c, oxccl_fault *fault) {
    group *g = ctx;
    pthread_mutex_lock(&g->lock);
    int32_t status = configure(g, c, fault);
    pthread_mutex_unlock(&g->lock);
    return status;
}

/* One tensor: all ranks add in the order of ranks and so compute the same bytes. */
static int32_t sum(group *g, uint64_t tensor, const oxccl_buffer *buffer, int64_t deadline, oxccl_fault *fault) {
    char key[512];
    float *sums = calloc(buffer->count + 1, sizeof *sums), *theirs = calloc(buffer->count + 1, sizeof *theirs);
    oxccl_bytes mine = {buffer->ptr, buffer->bytes};
    key_of(key, sizeof key, g, "part", g->seq, tensor, g->rank);
    int32_t status = sums && theirs ? g->store.set(g->store.ctx, oxccl_text(key), mine, left(deadline), fault)
                                    : oxccl_fail(fault, OXCCL_BACKEND, "out of memory");
    g->sent += g->world > 1 ? buffer->bytes : 0;
    for (uint32_t r = 0; r < g->world && status == OXCCL_OK; r++) {
        part p = {theirs, buffer->bytes, 0};
        status = read_part(g, "part", g->seq, tensor, r, &p, deadline, fault);
        if (status == OXCCL_OK && p.got != buffer->bytes)
            status = oxccl_fail(fault, OXCCL_MISMATCH, "another rank's part has another size");
        g->received += r != g->rank ? p.got : 0;
        for (uint64_t i = 0; i < buffer->count; i++)
            sums[i] += theirs[i];
    }
    if (status == OXCCL_OK && buffer->bytes)
        memcpy(buffer->ptr, sums, buffer->bytes);
    free(sums);
    free(theirs);
    return status;
}

static int32_t all_reduce(group *g, const oxccl_operation *o, oxccl_fault *fault) {
    int64_t deadline = now_ms() + o->timeout_ms;
    for (uint64_t b = 0; b < o->buffer_count; b++) {
        /* By the host's stride: its struct may be larger than the one in this header. */
        const oxccl_buffer *buffer = (const void *)((const char *)o->buffers + b * o->buffer_stride);
        int32_t status = sum(g, b, buffer, deadline, fault);
        if (status != OXCCL_OK)
            return status;
    }
    g->seq++;
    return OXCCL_OK;
}

/* Accepts, works, and reports: done before it returns. A real backend hands the operation to a thread or a device and calls `complete` from
 * there; then it can be aborted too. */
static int32_t group_submit(void *ctx, const oxccl_operation *o, const oxccl_completion *completion,
                            oxccl_work_handle *work, oxccl_fault *fault) {
    group *g = ctx;
    (void)work;
    if (o->kind != OXCCL_OP_ALL_REDUCE || o->reduce != OXCCL_SUM)
        return oxccl_fail(fault, OXCCL_UNSUPPORTED, "acme does sums");
    pthread_mutex_lock(&g->lock);
    if (g->world == 0) {
        pthread_mutex_unlock(&g->lock);
        return oxccl_fail(fault, OXCCL_INVALID_STATE, "the group is shut down");
    }
    if (g->failed) {
        char text[sizeof g->why.text + 64];
        snprintf(text, sizeof text, "the group failed earlier: %.*s", (int)g->why.text_len, (const char *)g->why.text);
        pthread_mutex_unlock(&g->lock);
        return oxccl_fail(fault, OXCCL_POISONED, text);
    }
    oxccl_fault why = no_fault();
    oxccl_outcome outcome;
    memset(&outcome, 0, sizeof outcome);
    outcome.size = sizeof outcome;
    outcome.source = OXCCL_NONE;
    outcome.status = all_reduce(g, o, &why);
    if (outcome.status != OXCCL_OK) {
        /* The ranks may not be at the same operation any more. */
        g->why = why;
        g->failed = 1;
        outcome.fault = &why;
    }
    pthread_mutex_unlock(&g->lock);
    completion->complete(completion->ctx, &outcome);
    return OXCCL_OK;
}

/* Nothing is pending between calls. A backend that advertises OXCCL_FEATURE_ABORT ends its pending operations here. */
static void group_abort(void *ctx, oxccl_str reason) { (void)ctx, (void)reason; }

static int32_t group_error(void *ctx, oxccl_fault *fault) {
    group *g = ctx;
    if (!g->failed)
        return OXCCL_OK;
    oxccl_fault_copy(fault, &g->why);
    return OXCCL_FAILED;
}

static int32_t group_shutdown(void *ctx, int64_t timeout_ms, oxccl_fault *fault) {
    group *g = ctx;
    (void)timeout_ms, (void)fault;
    pthread_mutex_lock(&g->lock); /* what runs ends first */
    g->rank = g->world = 0;
    pthread_mutex_unlock(&g->lock);
    return OXCCL_OK;
}

static void group_traffic(void *ctx, oxccl_traffic *traffic) {
    group *g = ctx;
    traffic->sent = g->sent;
    traffic->received = g->received;
}

static void group_close(void *ctx) {
    group *g = ctx;
    if (g->has_store)
        g->store.release(g->store.ctx);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* ---- the plugin ---- */

/* Cheap, and the place to say what is missing: oxccl_fail(fault, OXCCL_UNSUPPORTED, "no device") with fault->reason set. */
static int32_t probe(void *ctx, uint32_t backend, oxccl_fault *fault) {
    (void)ctx, (void)backend, (void)fault;
    return OXCCL_OK;
}

static void capabilities(void *ctx, uint32_t backend, void *reply_ctx, void (*reply)(void *, const oxccl_capabilities *)) {
    (void)ctx, (void)backend;
    tell(reply_ctx, reply);
}

static int32_t create(void *ctx, uint32_t backend, oxccl_device_id device, const oxccl_group_options *options,
                      oxccl_group *out, oxccl_fault *fault) {
    (void)ctx, (void)backend, (void)device;
    if (options->set || options->hint_count)
        return oxccl_fail(fault, OXCCL_INVALID_ARGUMENT, "acme honours no options");
    group *g = calloc(1, sizeof *g);
    if (!g)
        return oxccl_fail(fault, OXCCL_BACKEND, "out of memory");
    pthread_mutex_init(&g->lock, NULL);
    out->ctx = g;
    out->info = group_info;
    out->capabilities = group_capabilities;
    out->configure = group_configure;
    out->submit = group_submit;
    out->abort = group_abort;
    out->error = group_error;
    out->shutdown = group_shutdown;
    out->traffic = group_traffic;
    out->close = group_close;
    return OXCCL_OK;
}

static const oxccl_backend_entry backend = {sizeof backend, {"acme", sizeof "acme" - 1}, {"cpu", 3}};
static const oxccl_backend_entry *const backends[] = {&backend};

int32_t oxccl_plugin_query_v1(oxccl_query_reply *reply) {
    reply->magic = OXCCL_PLUGIN_MAGIC;
    reply->major = OXCCL_PLUGIN_MAJOR;
    reply->min_minor = 0;
    reply->max_minor = OXCCL_PLUGIN_MINOR;
    reply->name = oxccl_text("acme");
    reply->version = oxccl_text("0.1.0");
    reply->backends = backends;
    reply->backend_count = 1;
    return OXCCL_OK;
}

int32_t oxccl_plugin_open_v1(const oxccl_host *host, oxccl_plugin *plugin, oxccl_fault *fault) {
    (void)host, (void)fault;
    plugin->probe = probe;
    plugin->capabilities = capabilities;
    plugin->create = create;
    return OXCCL_OK;
}
