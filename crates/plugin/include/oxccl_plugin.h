/* oxccl plugin ABI 1.0: backends and device kinds as shared libraries.
 *
 * Generated from crates/plugin/src/abi.rs and abi/meaning.rs, and the texts and times from
 * crates/conformance/src/expected.rs; do not edit. The rules are in docs/plugins.md.
 *
 * A plugin exports two functions:
 *
 *   int32_t oxccl_plugin_query_v1(oxccl_query_reply *reply);
 *   int32_t oxccl_plugin_open_v1(const oxccl_host *host, oxccl_plugin *plugin, oxccl_fault *fault);
 *
 * Functions return 0 if they did their work. Structs with a `size` grow at their end only: set `size` to what
 * you know, and take at most what both sides know.
 */
#ifndef OXCCL_PLUGIN_H
#define OXCCL_PLUGIN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Pointers. A function of a table may be null only where its comment says so. Lists (buffers, children,
 * splits, keys, hints, notes, options, shape) may be null if their count is 0. ctx is passed back as it is
 * and may be null. fault, reply, outcome and the other places for results are never null. */

/* Buffers. oxccl_operation.buffers holds inputs before outputs, pairs in turn, as oxccl_op says; step through
 * it with buffer_stride, not with your own sizeof. All buffers of an operation have one element type (those
 * of a batch may differ), do not overlap and are where the group's capabilities say. count may be 0: then ptr
 * must not be read. The host has checked counts, ranks and splits of this rank; that the ranks fit each other
 * is for the plugin to find out. */

/* Order. Collectives of a group run in the order of submission, the same on all ranks. A send or a receive is
 * ordered among those with the same peer, direction and (TAGS) tag only, and waits for no collective: a
 * receive that waits for its sender must hold up nothing else. */

/* Bools. Where BOOL is moved or reduced, an output holds 0 or 1, whatever byte above 0 an input had; of a
 * broadcast the root's own buffer too. */

/* Numbers. A NaN wins in MIN and MAX, also in elements of 16 bits, and sums of integers wrap around. */

/* Names in texts. An operation, an element type and a reduction are called as here, in lower case and without
 * the prefix: all_reduce, bf16, sum; premul_sum(F) with its factor. */

/* Faults. Write the cause alone: the host puts operation, rank, epoch and peer before it. A fault that is
 * passed in has its size: fill it in with oxccl_fail or oxccl_fault_copy. */

/* Refusals. submit refuses what it does not know with UNSUPPORTED and touches nothing. Calls before configure
 * do not reach the plugin; those after shutdown do, and are INVALID_STATE. */

/* configure returns by its timeout_ms. If ranks are missing then, the fault is TIMEOUT and names them (rank R
 * of N, or ranks R, S of N) and the phase that it waited in; it may take a second more to find out who. If it
 * is cancelled (oxccl_store.wanted fails, waits at the store fail; whose fault is passed on), or abort is
 * called meanwhile, the fault is ABORTED with the reason. Where RECONFIGURE is not advertised, a second call
 * may be refused with INVALID_STATE. */

/* Time-outs are milliseconds from the call, never negative, and at most a hundred years, so that they can be
 * added to a clock of nanoseconds. */

/* Faults that the conformance suite checks, of groups that advertise ABORT, RECONFIGURE or
 * MISMATCH_DETECTION: the kind, and what the text contains as whole words. N, TAG, A and B stand for
 * numbers, REASON, CAUSE, ONE, OTHER and RANKS for texts. Of a rank that died it is PEER_LOST with the rank in peer.
 *
 *   abort(REASON), on the rank that called it:
 *       ABORTED, "REASON"
 *   abort(REASON) on rank N, on the other ranks:
 *       ABORTED, "REASON" and "rank N"
 *   a call on a group that is poisoned by CAUSE:
 *       POISONED, "CAUSE"
 *   the deadline of a collective passed:
 *       TIMEOUT, "rank"
 *   the deadline of a receive from rank N with tag TAG passed:
 *       TIMEOUT, "rank N" and "TAG"
 *   configure without rank N:
 *       TIMEOUT, "rank N of" and "phase"
 *   configure cancelled for REASON:
 *       ABORTED, "REASON"
 *   two ranks expect A and B bytes of one message:
 *       MISMATCH, "A bytes" and "B bytes"
 *   ranks call ONE and OTHER: the operation's name, `N elements`, the name of the type or of the reduction, or `root R`, whichever differs:
 *       MISMATCH, "ONE" and "OTHER"
 *   a message is of ONE, and its receive of OTHER, each `N elements of TYPE`; on both ranks:
 *       MISMATCH, "ONE" and "OTHER"
 *   a monitored barrier at its deadline, without RANKS: `rank R`, or `ranks R, S`:
 *       TIMEOUT, "RANKS"
 */

/* Times that it allows, with room for a busy machine. The host itself fails an operation 2 s after its
 * timeout_ms and poisons the group.
 *
 *   from an abort to the end of pending work, here and on other ranks: 5 s
 *   from the start of an operation whose deadline is soon to its end: 10 s
 *   from the death of a rank to the end of the others' work: 10 s
 *   from the start of a configure that is cancelled to its end: 15 s
 *   from the start of a case to its end on every rank: 90 s
 */

#define OXCCL_PLUGIN_MAGIC UINT64_C(0x474c504c4343584f)
#define OXCCL_PLUGIN_MAJOR 1u
#define OXCCL_PLUGIN_MINOR 0u
#define OXCCL_PLUGIN_MINIMUM_MINOR 0u
#define OXCCL_NONE UINT32_MAX
#define OXCCL_OK 0
#define OXCCL_FAILED 1
#define OXCCL_WORK_POLLED 1u
#define OXCCL_FAULT_CODE 1u
#define OXCCL_FAULT_RANK 2u
#define OXCCL_FAULT_PEER 4u
#define OXCCL_FAULT_EPOCH 8u
#define OXCCL_FAULT_SEQ 16u
#define OXCCL_FAULT_DATA 32u
#define OXCCL_FAULT_RETRYABLE 64u
#define OXCCL_OPTION_HIGH_PRIORITY 1u
#define OXCCL_OPTION_CGA_CLUSTER_SIZE 2u
#define OXCCL_OPTION_MIN_CTAS 4u
#define OXCCL_OPTION_MAX_CTAS 8u
#define OXCCL_OPTION_NET_NAME 16u
#define OXCCL_OPTION_SPLIT_SHARE 32u
#define OXCCL_OPTION_BLOCKING 64u
#define OXCCL_OPTION_TRAFFIC_CLASS 128u
#define OXCCL_DETAIL_END 0x1f

/* Operations, and what oxccl_operation.buffers holds for each. n is the number of ranks; counts are in
 * elements. */
enum oxccl_op {
    /* 1 or more buffers (coalesced), each reduced in place. reduce is set. The same counts on all ranks. */
    OXCCL_OP_ALL_REDUCE = 0,
    /* 1 or more buffers (coalesced), read on root and written elsewhere. The same counts on all ranks. */
    OXCCL_OP_BROADCAST = 1,
    /* 1 buffer, read on all ranks and written on root only. reduce is set. */
    OXCCL_OP_REDUCE = 2,
    /* 1 input, then n outputs. Output r becomes rank r's input and has its count; counts may differ between
     * ranks. */
    OXCCL_OP_ALL_GATHER = 3,
    /* 1 or more pairs (coalesced): input, output, input, output, …. An output has n times the count of its
     * input and becomes the inputs of all ranks one after the other. */
    OXCCL_OP_ALL_GATHER_INTO = 4,
    /* 1 input; then on root n outputs as in an all-gather, elsewhere none. */
    OXCCL_OP_GATHER = 5,
    /* On root n inputs (input_count is n), elsewhere none (0); then 1 output, which becomes the root's input
     * for this rank. */
    OXCCL_OP_SCATTER = 6,
    /* n inputs (input_count is n), then 1 output: the reduction of all ranks' inputs for this rank. Counts
     * may differ between parts. reduce is set. Inputs are not written. */
    OXCCL_OP_REDUCE_SCATTER = 7,
    /* 1 or more pairs (coalesced): input, output, input, output, …. An input has n times the count of its
     * output, which becomes this rank's part of the reduction. reduce is set. Inputs are not written. */
    OXCCL_OP_REDUCE_SCATTER_INTO = 8,
    /* n inputs (input_count is n), then n outputs. Output r becomes rank r's input for this rank; counts may
     * differ. */
    OXCCL_OP_ALL_TO_ALL = 9,
    /* 1 input, 1 output, both in parts by rank. input_splits and output_splits have n counts each, or none: n
     * equal parts. */
    OXCCL_OP_ALL_TO_ALL_INTO = 10,
    /* 1 buffer, read. peer and tag are set. Ends once the memory may be used again; with MISMATCH_DETECTION
     * not before its receive was found to fit. */
    OXCCL_OP_SEND = 11,
    /* 1 buffer, written, of the sender's type and count. tag is set; peer is none to receive from any rank
     * (RECV_ANY), and the outcome's source says who sent. */
    OXCCL_OP_RECV = 12,
    /* No buffers. Ends once all ranks have entered. */
    OXCCL_OP_BARRIER = 13,
    /* No buffers. As a barrier; at the deadline the fault of every rank names the missing ranks (wait_all). */
    OXCCL_OP_MONITORED_BARRIER = 14,
    /* No buffers of its own: 1 or more children, sends and receives with 1 buffer each, that progress
     * together in any order. */
    OXCCL_OP_BATCH = 15,
    /* 1 or more buffers (coalesced) in n equal parts: part r becomes rank r's, which is the input. The same
     * collective as ALL_GATHER_INTO: other ranks may call that. */
    OXCCL_OP_ALL_GATHER_IN_PLACE = 16,
    /* 1 or more buffers (coalesced) in n equal parts: this rank's part becomes the reduction of it; the
     * others may be written. reduce is set. The same collective as REDUCE_SCATTER_INTO: other ranks may call
     * that. */
    OXCCL_OP_REDUCE_SCATTER_IN_PLACE = 17,
};

/* Element types. */
enum oxccl_dtype {
    OXCCL_DTYPE_F64 = 0,
    OXCCL_DTYPE_F32 = 1,
    OXCCL_DTYPE_F16 = 2,
    OXCCL_DTYPE_BF16 = 3,
    OXCCL_DTYPE_F8E4M3 = 4,
    OXCCL_DTYPE_F8E5M2 = 5,
    OXCCL_DTYPE_I64 = 6,
    OXCCL_DTYPE_I32 = 7,
    OXCCL_DTYPE_I16 = 8,
    OXCCL_DTYPE_I8 = 9,
    OXCCL_DTYPE_U64 = 10,
    OXCCL_DTYPE_U32 = 11,
    OXCCL_DTYPE_U16 = 12,
    OXCCL_DTYPE_U8 = 13,
    OXCCL_DTYPE_BOOL = 14,
};

/* Reductions. */
enum oxccl_reduce {
    OXCCL_SUM = 0,
    OXCCL_AVG = 1,
    OXCCL_PRODUCT = 2,
    OXCCL_MIN = 3,
    OXCCL_MAX = 4,
    OXCCL_BAND = 5,
    OXCCL_BOR = 6,
    OXCCL_BXOR = 7,
    OXCCL_PREMUL_SUM = 8,
};

/* Features of a group, and what a plugin that advertises one has to do. */
enum oxccl_feature {
    /* abort, from any thread, ends all pending operations with ABORTED and the reason within 100 ms, on all
     * ranks; the group is poisoned then. So does what a group cannot go on after, on all ranks and with the
     * same kind: a deadline that passed (TIMEOUT), ranks that called different things (MISMATCH), a rank that
     * died (PEER_LOST). A rank that has heard of a failure passes it on before it closes or is configured
     * again: another one may not have heard. A poisoned group refuses calls with POISONED. A rank that was
     * closed or shut down has left, which ends only what still needs it: say so in close without waiting, for
     * its process may end right after, and that is no death. */
    OXCCL_FEATURE_ABORT = 0,
    /* configure works again, after a failure too, with other ranks; no byte of an earlier epoch arrives. An
     * epoch that is not larger, or a rank outside the world, is INVALID_ARGUMENT and leaves the group as it
     * was. */
    OXCCL_FEATURE_RECONFIGURE = 1,
    /* Ranks that call different operations, types, counts, reductions or roots get MISMATCH, which names both
     * sides; so do both ends of a message whose type or count differs. */
    OXCCL_FEATURE_MISMATCH_DETECTION = 2,
    /* All ranks of a finished all-reduce hold equal bytes. */
    OXCCL_FEATURE_BITWISE_EQUAL = 3,
    /* contribute 0 is honoured in reductions: the rank gives the identity and is not counted; averages divide
     * by the contributors, whose number is in the outcome. Without it contribute is always 1. */
    OXCCL_FEATURE_CONTRIBUTORS = 4,
    /* A receive takes the message with its tag, in whatever order they were sent. Without it messages of two
     * ranks match in the order in which they are sent, and tag is always 0. */
    OXCCL_FEATURE_TAGS = 5,
    /* A receive may name no sender: peer is none. */
    OXCCL_FEATURE_RECV_ANY = 6,
    /* Several ranks of a group may be threads of one process. */
    OXCCL_FEATURE_THREAD_RANKS = 7,
    /* split is there and works. */
    OXCCL_FEATURE_SPLIT = 8,
    /* execute is there; when it returns, nothing touches the buffers any more, whether it succeeded or
     * failed. */
    OXCCL_FEATURE_BORROW = 9,
};

/* What a caller can do about a fault. */
enum oxccl_error_kind {
    OXCCL_INVALID_ARGUMENT = 1,
    OXCCL_UNSUPPORTED = 2,
    OXCCL_INVALID_STATE = 3,
    OXCCL_TIMEOUT = 4,
    OXCCL_PEER_LOST = 5,
    OXCCL_PROTOCOL = 6,
    OXCCL_MISMATCH = 7,
    OXCCL_ABORTED = 8,
    OXCCL_POISONED = 9,
    OXCCL_NOT_FOUND = 10,
    OXCCL_CONFLICT = 11,
    OXCCL_UNAVAILABLE = 12,
    OXCCL_IO = 13,
    OXCCL_CORRUPT = 14,
    OXCCL_BACKEND = 15,
    OXCCL_INTERNAL = 16,
};

/* Why a backend cannot be used; parts in oxccl_fault.detail. */
enum oxccl_reason {
    OXCCL_REASON_LIBRARY_NOT_FOUND = 1,
    OXCCL_REASON_LIBRARY_NOT_LOADABLE = 2,
    OXCCL_REASON_SYMBOL_MISSING = 3,
    OXCCL_REASON_VERSION_TOO_OLD = 4,
    OXCCL_REASON_VERSION_TOO_NEW = 5,
    OXCCL_REASON_NO_DEVICE = 6,
    OXCCL_REASON_INIT_FAILED = 7,
};

/* Levels of log events, from the gravest. */
enum oxccl_level {
    OXCCL_LEVEL_ERROR = 1,
    OXCCL_LEVEL_WARN = 2,
    OXCCL_LEVEL_INFO = 3,
    OXCCL_LEVEL_DEBUG = 4,
    OXCCL_LEVEL_TRACE = 5,
};

typedef struct oxccl_str oxccl_str;
typedef struct oxccl_bytes oxccl_bytes;
typedef struct oxccl_sink oxccl_sink;
typedef struct oxccl_note oxccl_note;
typedef struct oxccl_device_id oxccl_device_id;
typedef struct oxccl_fault oxccl_fault;
typedef struct oxccl_backend_entry oxccl_backend_entry;
typedef struct oxccl_query_reply oxccl_query_reply;
typedef struct oxccl_host oxccl_host;
typedef struct oxccl_capabilities oxccl_capabilities;
typedef struct oxccl_group_options oxccl_group_options;
typedef struct oxccl_info oxccl_info;
typedef struct oxccl_store oxccl_store;
typedef struct oxccl_configuration oxccl_configuration;
typedef struct oxccl_buffer oxccl_buffer;
typedef struct oxccl_operation oxccl_operation;
typedef struct oxccl_outcome oxccl_outcome;
typedef struct oxccl_completion oxccl_completion;
typedef struct oxccl_work_handle oxccl_work_handle;
typedef struct oxccl_traffic oxccl_traffic;
typedef struct oxccl_group oxccl_group;
typedef struct oxccl_device_table oxccl_device_table;
typedef struct oxccl_plugin oxccl_plugin;

/* Text in UTF-8, not ended by a zero. Valid for the call only, except where it says otherwise. Fixed. */
struct oxccl_str {
    /* The first byte; may be null if len is 0. */
    const char *ptr;
    /* The number of bytes. */
    uint64_t len;
};

/* Bytes, valid for the call only. Fixed. */
struct oxccl_bytes {
    /* The first byte; may be null if len is 0. */
    const void *ptr;
    /* The number of bytes. */
    uint64_t len;
};

/* Takes an answer of any length: the callee calls write during the call, once per value. Fixed. */
struct oxccl_sink {
    /* Passed back to write. */
    void *ctx;
    /* Copies the bytes. */
    void (*write)(void *ctx, oxccl_bytes bytes);
};

/* A pair of texts: a note (operation, in words) or a hint (name, value). Fixed. */
struct oxccl_note {
    /* What it is about, or the name. */
    oxccl_str subject;
    /* The text, or the value. */
    oxccl_str text;
};

/* A device. Fixed. */
struct oxccl_device_id {
    /* The kind in lower case, cpu for host memory. */
    oxccl_str kind;
    /* Which one of that kind; 0 for the CPU. */
    uint32_t index;
    /* Zero. */
    uint32_t reserved;
};

/* Why a call failed. The caller makes it, with size set and the rest zero, and passes its address; the callee
 * fills it in if and only if it returns something else than 0. */
struct oxccl_fault {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* An oxccl_error_kind. */
    uint32_t kind;
    /* Which of the fields below are set, and whether a retry may help: OXCCL_FAULT_…. */
    uint32_t flags;
    /* The vendor library's own code. */
    int64_t code;
    /* This process's rank. */
    uint32_t rank;
    /* The other rank that is involved. */
    uint32_t peer;
    /* The epoch of the group's configuration. */
    uint64_t epoch;
    /* The sequence number of the operation. */
    uint64_t seq;
    /* The number of elements. */
    uint64_t count;
    /* An oxccl_dtype. */
    uint32_t dtype;
    /* Why a backend cannot be used (oxccl_reason), 0 for other faults. */
    uint32_t reason;
    /* The bytes used of text. */
    uint32_t text_len;
    /* The bytes used of detail. */
    uint32_t detail_len;
    /* What happened, in UTF-8. */
    uint8_t text[1024];
    /* The parts of the reason, each ended by the byte 0x1f. */
    uint8_t detail[512];
};

/* A backend that a plugin brings. Lives as long as the library. */
struct oxccl_backend_entry {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* The name, in lower case. Lives as long as the library. */
    oxccl_str name;
    /* The device kind that it serves. Lives as long as the library. */
    oxccl_str device;
};

/* The reply to oxccl_plugin_query_v1. The host sets size to what it can take and everything else to zero. */
struct oxccl_query_reply {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* OXCCL_PLUGIN_MAGIC. */
    uint64_t magic;
    /* OXCCL_PLUGIN_MAJOR. */
    uint32_t major;
    /* The oldest minor version of the ABI with which the plugin works. */
    uint32_t min_minor;
    /* The newest minor version that the plugin knows. */
    uint32_t max_minor;
    /* The number of backends. */
    uint32_t backend_count;
    /* The number of devices. */
    uint32_t device_count;
    /* Zero. */
    uint32_t reserved;
    /* The library's own name. Lives as long as the library. */
    oxccl_str name;
    /* The library's version. Lives as long as the library. */
    oxccl_str version;
    /* What it brings. Lives as long as the library. */
    const oxccl_backend_entry *const *backends;
    /* The device kinds that it brings. Lives as long as the library. */
    const oxccl_str *devices;
};

/* What the host offers to a plugin. Lives as long as the process. */
struct oxccl_host {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* The minor version that both sides use from now on. */
    uint32_t minor;
    /* Zero. */
    uint32_t reserved;
    /* The host's version. */
    oxccl_str version;
    /* Logs one event. Any thread. */
    void (*log)(void *ctx, uint32_t level, oxccl_str target, oxccl_str text);
    /* The most detailed oxccl_level that is read now; 0 for none. Any thread. */
    uint32_t (*log_level)(void *ctx);
};

/* What a backend offers. Bits that the host does not know are ignored: it cannot call what it cannot name. */
struct oxccl_capabilities {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Bit n: the oxccl_op n is served. */
    uint32_t ops;
    /* Bit n: the oxccl_dtype n can be moved, by every operation of ops that does not reduce. */
    uint32_t moves;
    /* Bit n: the oxccl_feature n is offered. */
    uint32_t features;
    /* The number of reduces, which oxccl_reduce counts; reductions beyond it are not offered. */
    uint32_t reduce_count;
    /* One set of element types (as moves) per oxccl_reduce. */
    const uint32_t *reduces;
    /* The names of the options that are honoured, hint:NAME for hints; variable:REST for an environment
     * variable OXCCL_<BACKEND>_REST that the plugin reads by itself, or the host refuses it as a misspelt
     * option. */
    const oxccl_str *options;
    /* The number of options. */
    uint64_t option_count;
    /* The device kinds whose memory is served. */
    const oxccl_str *devices;
    /* The number of devices. */
    uint64_t device_count;
    /* What is composed or limited: (operation, in words). */
    const oxccl_note *notes;
    /* The number of notes. */
    uint64_t note_count;
};

/* Options with which a group is made. One that is not honoured must be refused (OXCCL_INVALID_ARGUMENT). */
struct oxccl_group_options {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Which of the options are set: OXCCL_OPTION_…. */
    uint32_t set;
    /* If not 0, options that are not honoured are logged and dropped instead of refused. */
    uint32_t lenient;
    /* How long an operation may take when the call names no deadline; the timeout_ms of an operation has it
     * already. */
    int64_t timeout_ms;
    /* 0 or 1. */
    uint32_t is_high_priority_stream;
    /* Thread blocks per cluster. */
    uint32_t cga_cluster_size;
    /* The least number of channels. */
    uint32_t min_ctas;
    /* The largest number of channels. */
    uint32_t max_ctas;
    /* 0 or 1. */
    uint32_t split_share;
    /* 0 or 1. */
    uint32_t blocking;
    /* The traffic class of the network. */
    uint32_t traffic_class;
    /* Zero. */
    uint32_t reserved;
    /* The network interface or module. */
    oxccl_str net_name;
    /* The backend's own hints. */
    const oxccl_note *hints;
    /* The number of hints. */
    uint64_t hint_count;
};

/* What a group is right now. */
struct oxccl_info {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* The backend's name. */
    oxccl_str backend;
    /* The group's name. */
    oxccl_str name;
    /* This process's rank; 0 while not configured. */
    uint32_t rank;
    /* The number of ranks; 0 while not configured. */
    uint32_t world_size;
    /* The epoch of the configuration. */
    uint64_t epoch;
    /* The device that the group serves. */
    oxccl_device_id device;
};

/* A key-value store through which the ranks find each other. Any thread may call it. The struct is valid for
 * the call in which it is passed; a copy of it may be used as long as a reference taken with retain is held.
 * Keys are non-empty UTF-8. A time-out counts from the call. */
struct oxccl_store {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* Takes one more reference to ctx. */
    void (*retain)(void *ctx);
    /* Gives one back. */
    void (*release)(void *ctx);
    /* Sets a key. */
    int32_t (*set)(void *ctx, oxccl_str key, oxccl_bytes value, int64_t timeout_ms, oxccl_fault *fault);
    /* Waits until the key exists; the value goes to value. */
    int32_t (*get)(void *ctx, oxccl_str key, int64_t timeout_ms, oxccl_sink value, oxccl_fault *fault);
    /* Adds to the integer at key (absent counts as 0). */
    int32_t (*add)(void *ctx, oxccl_str key, int64_t amount, int64_t timeout_ms, int64_t *result, oxccl_fault *fault);
    /* If the value is expected (or absent and expected is empty) sets desired; what stands then goes to
     * value. */
    int32_t (*compare_set)(void *ctx, oxccl_str key, oxccl_bytes expected, oxccl_bytes desired, int64_t timeout_ms, oxccl_sink value, oxccl_fault *fault);
    /* Whether all keys exist now: 0 or 1 in result. */
    int32_t (*check)(void *ctx, const oxccl_str *keys, uint64_t key_count, int64_t timeout_ms, uint32_t *result, oxccl_fault *fault);
    /* Waits until all keys exist at the same moment. */
    int32_t (*wait)(void *ctx, const oxccl_str *keys, uint64_t key_count, int64_t timeout_ms, oxccl_fault *fault);
    /* Removes a key; whether it existed is in result. (delete is a word of C++.) */
    int32_t (*remove)(void *ctx, oxccl_str key, int64_t timeout_ms, uint32_t *result, oxccl_fault *fault);
    /* Appends to the value of a key. */
    int32_t (*append)(void *ctx, oxccl_str key, oxccl_bytes value, int64_t timeout_ms, oxccl_fault *fault);
    /* Waits until all keys exist; the values go to values, one call per key, in order. */
    int32_t (*multi_get)(void *ctx, const oxccl_str *keys, uint64_t key_count, int64_t timeout_ms, oxccl_sink values, oxccl_fault *fault);
    /* Sets all pairs. */
    int32_t (*multi_set)(void *ctx, const oxccl_str *keys, const oxccl_bytes *values, uint64_t pair_count, int64_t timeout_ms, oxccl_fault *fault);
    /* The number of keys. */
    int32_t (*num_keys)(void *ctx, int64_t timeout_ms, int64_t *result, oxccl_fault *fault);
    /* The keys, sorted, one call of keys each. */
    int32_t (*list)(void *ctx, int64_t timeout_ms, oxccl_sink keys, oxccl_fault *fault);
    /* Blocks until world_size callers have entered. A key serves for one barrier only. */
    int32_t (*barrier)(void *ctx, oxccl_str key, uint32_t world_size, int64_t timeout_ms, oxccl_fault *fault);
    /* OK while the configure that passed this store is wanted; once it is cancelled, FAILED with the reason.
     * Never blocks; waits for keys end by themselves then. */
    int32_t (*wanted)(void *ctx, oxccl_fault *fault);
};

/* How a group is (re)configured. */
struct oxccl_configuration {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Where the ranks meet. */
    const oxccl_store *store;
    /* Put before every key; unique per configuration together with the epoch. */
    oxccl_str prefix;
    /* The group's name, for messages. */
    oxccl_str name;
    /* The new epoch; larger than any this group had. */
    uint64_t epoch;
    /* This process's rank. */
    uint32_t rank;
    /* The number of ranks, at least 1. */
    uint32_t world_size;
    /* configure must return by then, counted from the call. */
    int64_t timeout_ms;
};

/* Memory of one tensor: contiguous, aligned, lent from the call until the operation has ended (complete, or
 * the return of execute). Code that still touches it after that must hold a reference; what is never released
 * is never freed. */
struct oxccl_buffer {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* The address on the device; never null, and not to be read if bytes is 0. */
    void *ptr;
    /* The number of bytes. */
    uint64_t bytes;
    /* The number of elements. */
    uint64_t count;
    /* An oxccl_dtype. */
    uint32_t dtype;
    /* Zero. */
    uint32_t reserved;
    /* Where the memory is. */
    oxccl_device_id device;
    /* The lengths of the dimensions. */
    const uint64_t *shape;
    /* The number of dimensions. */
    uint64_t shape_len;
    /* Passed to retain and release. */
    void *owner;
    /* Takes a reference. Any thread. */
    void (*retain)(void *owner);
    /* Gives one back. Any thread. */
    void (*release)(void *owner);
};

/* One operation. The struct is valid for the call, the memory of the buffers longer (see oxccl_buffer). The
 * host has checked ranks, counts, element types, devices and overlaps against the capabilities. */
struct oxccl_operation {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* An oxccl_op. One that is not known must be refused. */
    uint32_t kind;
    /* An oxccl_reduce, or OXCCL_NONE. */
    uint32_t reduce;
    /* The factor of OXCCL_PREMUL_SUM. */
    double factor;
    /* The root, or OXCCL_NONE. */
    uint32_t root;
    /* The other rank of a send or receive; OXCCL_NONE to receive from any. */
    uint32_t peer;
    /* The tag of a send or receive. */
    uint32_t tag;
    /* Monitored barrier: name all missing ranks (1) or the first one (0). */
    uint32_t wait_all;
    /* 0: this rank gives the identity of the reduction and is not counted. */
    uint32_t contribute;
    /* How many of the buffers come first as the list of inputs, where oxccl_op says that there is one; else
     * 0. */
    uint32_t input_count;
    /* The tensors, as oxccl_op says. */
    const oxccl_buffer *buffers;
    /* The number of buffers; 0 for barriers and batches. */
    uint64_t buffer_count;
    /* How input of an uneven all-to-all is split, in elements; none for even. */
    const uint64_t *input_splits;
    /* The number of input_splits. */
    uint64_t input_split_count;
    /* How output is split. */
    const uint64_t *output_splits;
    /* The number of output_splits. */
    uint64_t output_split_count;
    /* The sends and receives of a batch. */
    const oxccl_operation *children;
    /* The number of children. */
    uint64_t child_count;
    /* The bytes from one element of buffers to the next. */
    uint64_t buffer_stride;
    /* The bytes from one element of children to the next. */
    uint64_t child_stride;
    /* The operation must end by then, counted from the call. */
    int64_t timeout_ms;
    /* A stream of this plugin's own device kind after whose present end the inputs are ready; null: they are. */
    void *stream;
};

/* How an operation ended. */
struct oxccl_outcome {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* 0: it succeeded. */
    int32_t status;
    /* Receives: who sent, or OXCCL_NONE. */
    uint32_t source;
    /* Reductions: how many ranks contributed, the world size at most; 0 if not known, as without
     * CONTRIBUTORS. */
    uint32_t contributors;
    /* Zero. */
    uint32_t reserved;
    /* Why it failed; null if it succeeded. Read before complete returns, or after execute has: then the fault
     * of that call, or one that stays. */
    const oxccl_fault *fault;
};

/* How a plugin reports on an operation. Copied by the plugin. */
struct oxccl_completion {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* The operation has ended. Exactly once, from any thread, also from within submit; never if submit
     * refused. The group's close may come before this returns. ctx and the buffers must not be used
     * afterwards, except buffers that are still retained. */
    void (*complete)(void *ctx, const oxccl_outcome *outcome);
    /* Need not be called. Before complete: the operation is enqueued, event (of this plugin's device kind,
     * given away) will be reached when the device has finished it. */
    void (*recorded)(void *ctx, void *event);
};

/* A submitted operation, filled in by submit; may be left all zero, and each function may be null. complete
 * may come before submit returns. */
struct oxccl_work_handle {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* OXCCL_WORK_POLLED, or 0. */
    uint32_t flags;
    /* Zero. */
    uint32_t reserved;
    /* Makes progress without blocking (one thread polls for all groups); calls complete when the operation
     * has ended. Called from one thread, not after complete. */
    void (*poll)(void *ctx);
    /* Ends the operation; null: the group is aborted instead. */
    void (*abort)(void *ctx, oxccl_str reason);
    /* The host will not use ctx any more. Exactly once, after complete or from within it. */
    void (*close)(void *ctx);
};

/* Bytes moved by a group so far. */
struct oxccl_traffic {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* To other ranks. */
    uint64_t sent;
    /* From other ranks. */
    uint64_t received;
};

/* A group of ranks. All functions may be called from any thread; see Order above. abort, info and close must
 * not block. */
struct oxccl_group {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* Says what it is now: calls reply once, during the call. */
    void (*info)(void *ctx, void *reply_ctx, void (*reply)(void *reply_ctx, const oxccl_info *info));
    /* Says what it offers: calls reply once, during the call. */
    void (*capabilities)(void *ctx, void *reply_ctx, void (*reply)(void *reply_ctx, const oxccl_capabilities *capabilities));
    /* Connects the ranks at a new epoch, ending whatever an earlier one left over. */
    int32_t (*configure)(void *ctx, const oxccl_configuration *configuration, oxccl_fault *fault);
    /* Starts an operation. 0: it is accepted and will complete; else it is refused and nothing was touched.
     * It may carry the operation out within the call: the caller's thread waits then, and nothing can be
     * aborted meanwhile. */
    int32_t (*submit)(void *ctx, const oxccl_operation *operation, const oxccl_completion *completion, oxccl_work_handle *work, oxccl_fault *fault);
    /* A collective call: a group of the ranks with the same colour, ordered by (key, rank). has_color 0: none
     * for this rank, made becomes 0. May be null: groups cannot be split. */
    int32_t (*split)(void *ctx, uint32_t has_color, uint32_t color, uint32_t key, int64_t timeout_ms, oxccl_group *group, uint32_t *made, oxccl_fault *fault);
    /* Ends all pending operations and poisons the group. Without ABORT it may do nothing, if each operation
     * ends at its time-out. */
    void (*abort)(void *ctx, oxccl_str reason);
    /* The first failure since configure: 1 and the fault, or 0. May be null: the host knows only what
     * operations say. */
    int32_t (*error)(void *ctx, oxccl_fault *fault);
    /* Waits for pending operations, then aborts the rest. Calls are refused with INVALID_STATE until the next
     * configure. */
    int32_t (*shutdown)(void *ctx, int64_t timeout_ms, oxccl_fault *fault);
    /* Bytes moved so far, headers included. May be null: 0 is reported then, which the conformance suite does
     * not accept of a sum between ranks. */
    void (*traffic)(void *ctx, oxccl_traffic *traffic);
    /* The host will not use ctx any more. Exactly once. Pending operations still complete. */
    void (*close)(void *ctx);
    /* Runs an operation to its end, on the calling thread where that is possible. When it returns, only what
     * retained the buffers touches them. May be null: the host submits and waits. */
    int32_t (*execute)(void *ctx, const oxccl_operation *operation, oxccl_outcome *outcome, oxccl_fault *fault);
};

/* A device kind that a plugin brings. Lives as long as the process. Streams and events are handles of the
 * plugin; a handle that a function hands out belongs to the host until it is released. Any thread. */
struct oxccl_device_table {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* How many devices there are now. */
    uint32_t (*count)(void *ctx);
    /* The calling thread's current device. */
    int32_t (*current)(void *ctx, uint32_t *index, oxccl_fault *fault);
    /* Makes a device current on the calling thread. */
    int32_t (*set)(void *ctx, uint32_t index, oxccl_fault *fault);
    /* What the device is called. */
    int32_t (*name)(void *ctx, uint32_t index, oxccl_sink name, oxccl_fault *fault);
    /* Waits for all work of a device. */
    int32_t (*synchronize)(void *ctx, uint32_t index, int64_t timeout_ms, oxccl_fault *fault);
    /* Memory; the host gives it back with the buffer's release. shape of the result is ignored. */
    int32_t (*alloc)(void *ctx, uint32_t index, uint32_t dtype, const uint64_t *shape, uint64_t shape_len, oxccl_buffer *buffer, oxccl_fault *fault);
    /* Host to device, in the stream's order; returns once from may be reused. */
    int32_t (*copy_in)(void *ctx, oxccl_bytes from, const oxccl_buffer *to, void *stream, oxccl_fault *fault);
    /* Device to host, in the stream's order; returns once the bytes are there. */
    int32_t (*copy_out)(void *ctx, const oxccl_buffer *from, void *to, uint64_t to_len, void *stream, oxccl_fault *fault);
    /* The calling thread's current stream. */
    int32_t (*current_stream)(void *ctx, uint32_t index, void **stream, oxccl_fault *fault);
    /* A new stream. */
    int32_t (*new_stream)(void *ctx, uint32_t index, uint32_t high_priority, void **stream, oxccl_fault *fault);
    /* Gives a stream handle back. */
    void (*stream_release)(void *ctx, void *stream);
    /* Marks the present end of the stream. */
    int32_t (*stream_record)(void *ctx, void *stream, void **event, oxccl_fault *fault);
    /* Lets later work of the stream start after the event, without blocking the host. */
    int32_t (*stream_wait)(void *ctx, void *stream, void *event, oxccl_fault *fault);
    /* Whether nothing is left to do: 0 or 1 in done. */
    int32_t (*stream_query)(void *ctx, void *stream, uint32_t *done, oxccl_fault *fault);
    /* Waits until the stream is empty. */
    int32_t (*stream_synchronize)(void *ctx, void *stream, int64_t timeout_ms, oxccl_fault *fault);
    /* Gives an event handle back. */
    void (*event_release)(void *ctx, void *event);
    /* Whether it was reached: 0 or 1 in done. */
    int32_t (*event_query)(void *ctx, void *event, uint32_t *done, oxccl_fault *fault);
    /* Waits until it is reached. */
    int32_t (*event_synchronize)(void *ctx, void *event, int64_t timeout_ms, oxccl_fault *fault);
    /* 1 if the device computes in FP8 by itself. */
    uint32_t (*native_fp8)(void *ctx, uint32_t index);
};

/* An opened plugin. Lives as long as the process. Backends and devices are named by their place in the
 * query's lists. Any thread. */
struct oxccl_plugin {
    /* The bytes that the writer of this struct knows. */
    uint64_t size;
    /* Passed back to the functions. */
    void *ctx;
    /* Whether the backend can be used here and now; the fault says why not. */
    int32_t (*probe)(void *ctx, uint32_t backend, oxccl_fault *fault);
    /* Says what the backend's groups offer: calls reply once, during the call. */
    void (*capabilities)(void *ctx, uint32_t backend, void *reply_ctx, void (*reply)(void *reply_ctx, const oxccl_capabilities *capabilities));
    /* Makes an unconfigured group. */
    int32_t (*create)(void *ctx, uint32_t backend, oxccl_device_id device, const oxccl_group_options *options, oxccl_group *group, oxccl_fault *fault);
    /* Hands out a device kind. May be null if the query lists none. */
    int32_t (*device)(void *ctx, uint32_t device, oxccl_device_table *table, oxccl_fault *fault);
    /* The vendor library behind a backend, in words; nothing is written if there is none. May be null. */
    void (*library)(void *ctx, uint32_t backend, oxccl_sink text);
};

#if defined(__GNUC__)
#define OXCCL_EXPORT __attribute__((visibility("default")))
#else
#define OXCCL_EXPORT
#endif

/* The two functions of a plugin. */
OXCCL_EXPORT int32_t oxccl_plugin_query_v1(oxccl_query_reply *reply);
OXCCL_EXPORT int32_t oxccl_plugin_open_v1(const oxccl_host *host, oxccl_plugin *plugin, oxccl_fault *fault);

/* A text that ends with a zero, lent. */
static inline oxccl_str oxccl_text(const char *text) {
    oxccl_str s;
    s.ptr = text;
    s.len = text ? strlen(text) : 0;
    return s;
}

/* Fills in a fault and returns what the failing function has to return. */
static inline int32_t oxccl_fail(oxccl_fault *fault, uint32_t kind, const char *text) {
    if (fault) {
        size_t len = strlen(text);
        fault->kind = kind;
        fault->text_len = (uint32_t)(len < sizeof fault->text ? len : sizeof fault->text);
        memcpy(fault->text, text, fault->text_len);
    }
    return OXCCL_FAILED;
}

/* Writes one fault over another, which keeps its size. */
static inline void oxccl_fault_copy(oxccl_fault *to, const oxccl_fault *from) {
    uint64_t size = to->size;
    memcpy(to, from, (size_t)(size < from->size ? size : from->size));
    to->size = size;
}

#ifdef OXCCL_PLUGIN_CHECK_LAYOUT
#ifdef __cplusplus
#define OXCCL_ASSERT static_assert
#else
#define OXCCL_ASSERT _Static_assert
#endif
OXCCL_ASSERT(sizeof(oxccl_str) == 16, "size of oxccl_str");
OXCCL_ASSERT(offsetof(oxccl_str, ptr) == 0, "oxccl_str.ptr");
OXCCL_ASSERT(offsetof(oxccl_str, len) == 8, "oxccl_str.len");
OXCCL_ASSERT(sizeof(oxccl_bytes) == 16, "size of oxccl_bytes");
OXCCL_ASSERT(offsetof(oxccl_bytes, ptr) == 0, "oxccl_bytes.ptr");
OXCCL_ASSERT(offsetof(oxccl_bytes, len) == 8, "oxccl_bytes.len");
OXCCL_ASSERT(sizeof(oxccl_sink) == 16, "size of oxccl_sink");
OXCCL_ASSERT(offsetof(oxccl_sink, ctx) == 0, "oxccl_sink.ctx");
OXCCL_ASSERT(offsetof(oxccl_sink, write) == 8, "oxccl_sink.write");
OXCCL_ASSERT(sizeof(oxccl_note) == 32, "size of oxccl_note");
OXCCL_ASSERT(offsetof(oxccl_note, subject) == 0, "oxccl_note.subject");
OXCCL_ASSERT(offsetof(oxccl_note, text) == 16, "oxccl_note.text");
OXCCL_ASSERT(sizeof(oxccl_device_id) == 24, "size of oxccl_device_id");
OXCCL_ASSERT(offsetof(oxccl_device_id, kind) == 0, "oxccl_device_id.kind");
OXCCL_ASSERT(offsetof(oxccl_device_id, index) == 16, "oxccl_device_id.index");
OXCCL_ASSERT(offsetof(oxccl_device_id, reserved) == 20, "oxccl_device_id.reserved");
OXCCL_ASSERT(sizeof(oxccl_fault) == 1608, "size of oxccl_fault");
OXCCL_ASSERT(offsetof(oxccl_fault, size) == 0, "oxccl_fault.size");
OXCCL_ASSERT(offsetof(oxccl_fault, kind) == 8, "oxccl_fault.kind");
OXCCL_ASSERT(offsetof(oxccl_fault, flags) == 12, "oxccl_fault.flags");
OXCCL_ASSERT(offsetof(oxccl_fault, code) == 16, "oxccl_fault.code");
OXCCL_ASSERT(offsetof(oxccl_fault, rank) == 24, "oxccl_fault.rank");
OXCCL_ASSERT(offsetof(oxccl_fault, peer) == 28, "oxccl_fault.peer");
OXCCL_ASSERT(offsetof(oxccl_fault, epoch) == 32, "oxccl_fault.epoch");
OXCCL_ASSERT(offsetof(oxccl_fault, seq) == 40, "oxccl_fault.seq");
OXCCL_ASSERT(offsetof(oxccl_fault, count) == 48, "oxccl_fault.count");
OXCCL_ASSERT(offsetof(oxccl_fault, dtype) == 56, "oxccl_fault.dtype");
OXCCL_ASSERT(offsetof(oxccl_fault, reason) == 60, "oxccl_fault.reason");
OXCCL_ASSERT(offsetof(oxccl_fault, text_len) == 64, "oxccl_fault.text_len");
OXCCL_ASSERT(offsetof(oxccl_fault, detail_len) == 68, "oxccl_fault.detail_len");
OXCCL_ASSERT(offsetof(oxccl_fault, text) == 72, "oxccl_fault.text");
OXCCL_ASSERT(offsetof(oxccl_fault, detail) == 1096, "oxccl_fault.detail");
OXCCL_ASSERT(sizeof(oxccl_backend_entry) == 40, "size of oxccl_backend_entry");
OXCCL_ASSERT(offsetof(oxccl_backend_entry, size) == 0, "oxccl_backend_entry.size");
OXCCL_ASSERT(offsetof(oxccl_backend_entry, name) == 8, "oxccl_backend_entry.name");
OXCCL_ASSERT(offsetof(oxccl_backend_entry, device) == 24, "oxccl_backend_entry.device");
OXCCL_ASSERT(sizeof(oxccl_query_reply) == 88, "size of oxccl_query_reply");
OXCCL_ASSERT(offsetof(oxccl_query_reply, size) == 0, "oxccl_query_reply.size");
OXCCL_ASSERT(offsetof(oxccl_query_reply, magic) == 8, "oxccl_query_reply.magic");
OXCCL_ASSERT(offsetof(oxccl_query_reply, major) == 16, "oxccl_query_reply.major");
OXCCL_ASSERT(offsetof(oxccl_query_reply, min_minor) == 20, "oxccl_query_reply.min_minor");
OXCCL_ASSERT(offsetof(oxccl_query_reply, max_minor) == 24, "oxccl_query_reply.max_minor");
OXCCL_ASSERT(offsetof(oxccl_query_reply, backend_count) == 28, "oxccl_query_reply.backend_count");
OXCCL_ASSERT(offsetof(oxccl_query_reply, device_count) == 32, "oxccl_query_reply.device_count");
OXCCL_ASSERT(offsetof(oxccl_query_reply, reserved) == 36, "oxccl_query_reply.reserved");
OXCCL_ASSERT(offsetof(oxccl_query_reply, name) == 40, "oxccl_query_reply.name");
OXCCL_ASSERT(offsetof(oxccl_query_reply, version) == 56, "oxccl_query_reply.version");
OXCCL_ASSERT(offsetof(oxccl_query_reply, backends) == 72, "oxccl_query_reply.backends");
OXCCL_ASSERT(offsetof(oxccl_query_reply, devices) == 80, "oxccl_query_reply.devices");
OXCCL_ASSERT(sizeof(oxccl_host) == 56, "size of oxccl_host");
OXCCL_ASSERT(offsetof(oxccl_host, size) == 0, "oxccl_host.size");
OXCCL_ASSERT(offsetof(oxccl_host, ctx) == 8, "oxccl_host.ctx");
OXCCL_ASSERT(offsetof(oxccl_host, minor) == 16, "oxccl_host.minor");
OXCCL_ASSERT(offsetof(oxccl_host, reserved) == 20, "oxccl_host.reserved");
OXCCL_ASSERT(offsetof(oxccl_host, version) == 24, "oxccl_host.version");
OXCCL_ASSERT(offsetof(oxccl_host, log) == 40, "oxccl_host.log");
OXCCL_ASSERT(offsetof(oxccl_host, log_level) == 48, "oxccl_host.log_level");
OXCCL_ASSERT(sizeof(oxccl_capabilities) == 80, "size of oxccl_capabilities");
OXCCL_ASSERT(offsetof(oxccl_capabilities, size) == 0, "oxccl_capabilities.size");
OXCCL_ASSERT(offsetof(oxccl_capabilities, ops) == 8, "oxccl_capabilities.ops");
OXCCL_ASSERT(offsetof(oxccl_capabilities, moves) == 12, "oxccl_capabilities.moves");
OXCCL_ASSERT(offsetof(oxccl_capabilities, features) == 16, "oxccl_capabilities.features");
OXCCL_ASSERT(offsetof(oxccl_capabilities, reduce_count) == 20, "oxccl_capabilities.reduce_count");
OXCCL_ASSERT(offsetof(oxccl_capabilities, reduces) == 24, "oxccl_capabilities.reduces");
OXCCL_ASSERT(offsetof(oxccl_capabilities, options) == 32, "oxccl_capabilities.options");
OXCCL_ASSERT(offsetof(oxccl_capabilities, option_count) == 40, "oxccl_capabilities.option_count");
OXCCL_ASSERT(offsetof(oxccl_capabilities, devices) == 48, "oxccl_capabilities.devices");
OXCCL_ASSERT(offsetof(oxccl_capabilities, device_count) == 56, "oxccl_capabilities.device_count");
OXCCL_ASSERT(offsetof(oxccl_capabilities, notes) == 64, "oxccl_capabilities.notes");
OXCCL_ASSERT(offsetof(oxccl_capabilities, note_count) == 72, "oxccl_capabilities.note_count");
OXCCL_ASSERT(sizeof(oxccl_group_options) == 88, "size of oxccl_group_options");
OXCCL_ASSERT(offsetof(oxccl_group_options, size) == 0, "oxccl_group_options.size");
OXCCL_ASSERT(offsetof(oxccl_group_options, set) == 8, "oxccl_group_options.set");
OXCCL_ASSERT(offsetof(oxccl_group_options, lenient) == 12, "oxccl_group_options.lenient");
OXCCL_ASSERT(offsetof(oxccl_group_options, timeout_ms) == 16, "oxccl_group_options.timeout_ms");
OXCCL_ASSERT(offsetof(oxccl_group_options, is_high_priority_stream) == 24, "oxccl_group_options.is_high_priority_stream");
OXCCL_ASSERT(offsetof(oxccl_group_options, cga_cluster_size) == 28, "oxccl_group_options.cga_cluster_size");
OXCCL_ASSERT(offsetof(oxccl_group_options, min_ctas) == 32, "oxccl_group_options.min_ctas");
OXCCL_ASSERT(offsetof(oxccl_group_options, max_ctas) == 36, "oxccl_group_options.max_ctas");
OXCCL_ASSERT(offsetof(oxccl_group_options, split_share) == 40, "oxccl_group_options.split_share");
OXCCL_ASSERT(offsetof(oxccl_group_options, blocking) == 44, "oxccl_group_options.blocking");
OXCCL_ASSERT(offsetof(oxccl_group_options, traffic_class) == 48, "oxccl_group_options.traffic_class");
OXCCL_ASSERT(offsetof(oxccl_group_options, reserved) == 52, "oxccl_group_options.reserved");
OXCCL_ASSERT(offsetof(oxccl_group_options, net_name) == 56, "oxccl_group_options.net_name");
OXCCL_ASSERT(offsetof(oxccl_group_options, hints) == 72, "oxccl_group_options.hints");
OXCCL_ASSERT(offsetof(oxccl_group_options, hint_count) == 80, "oxccl_group_options.hint_count");
OXCCL_ASSERT(sizeof(oxccl_info) == 80, "size of oxccl_info");
OXCCL_ASSERT(offsetof(oxccl_info, size) == 0, "oxccl_info.size");
OXCCL_ASSERT(offsetof(oxccl_info, backend) == 8, "oxccl_info.backend");
OXCCL_ASSERT(offsetof(oxccl_info, name) == 24, "oxccl_info.name");
OXCCL_ASSERT(offsetof(oxccl_info, rank) == 40, "oxccl_info.rank");
OXCCL_ASSERT(offsetof(oxccl_info, world_size) == 44, "oxccl_info.world_size");
OXCCL_ASSERT(offsetof(oxccl_info, epoch) == 48, "oxccl_info.epoch");
OXCCL_ASSERT(offsetof(oxccl_info, device) == 56, "oxccl_info.device");
OXCCL_ASSERT(sizeof(oxccl_store) == 144, "size of oxccl_store");
OXCCL_ASSERT(offsetof(oxccl_store, size) == 0, "oxccl_store.size");
OXCCL_ASSERT(offsetof(oxccl_store, ctx) == 8, "oxccl_store.ctx");
OXCCL_ASSERT(offsetof(oxccl_store, retain) == 16, "oxccl_store.retain");
OXCCL_ASSERT(offsetof(oxccl_store, release) == 24, "oxccl_store.release");
OXCCL_ASSERT(offsetof(oxccl_store, set) == 32, "oxccl_store.set");
OXCCL_ASSERT(offsetof(oxccl_store, get) == 40, "oxccl_store.get");
OXCCL_ASSERT(offsetof(oxccl_store, add) == 48, "oxccl_store.add");
OXCCL_ASSERT(offsetof(oxccl_store, compare_set) == 56, "oxccl_store.compare_set");
OXCCL_ASSERT(offsetof(oxccl_store, check) == 64, "oxccl_store.check");
OXCCL_ASSERT(offsetof(oxccl_store, wait) == 72, "oxccl_store.wait");
OXCCL_ASSERT(offsetof(oxccl_store, remove) == 80, "oxccl_store.remove");
OXCCL_ASSERT(offsetof(oxccl_store, append) == 88, "oxccl_store.append");
OXCCL_ASSERT(offsetof(oxccl_store, multi_get) == 96, "oxccl_store.multi_get");
OXCCL_ASSERT(offsetof(oxccl_store, multi_set) == 104, "oxccl_store.multi_set");
OXCCL_ASSERT(offsetof(oxccl_store, num_keys) == 112, "oxccl_store.num_keys");
OXCCL_ASSERT(offsetof(oxccl_store, list) == 120, "oxccl_store.list");
OXCCL_ASSERT(offsetof(oxccl_store, barrier) == 128, "oxccl_store.barrier");
OXCCL_ASSERT(offsetof(oxccl_store, wanted) == 136, "oxccl_store.wanted");
OXCCL_ASSERT(sizeof(oxccl_configuration) == 72, "size of oxccl_configuration");
OXCCL_ASSERT(offsetof(oxccl_configuration, size) == 0, "oxccl_configuration.size");
OXCCL_ASSERT(offsetof(oxccl_configuration, store) == 8, "oxccl_configuration.store");
OXCCL_ASSERT(offsetof(oxccl_configuration, prefix) == 16, "oxccl_configuration.prefix");
OXCCL_ASSERT(offsetof(oxccl_configuration, name) == 32, "oxccl_configuration.name");
OXCCL_ASSERT(offsetof(oxccl_configuration, epoch) == 48, "oxccl_configuration.epoch");
OXCCL_ASSERT(offsetof(oxccl_configuration, rank) == 56, "oxccl_configuration.rank");
OXCCL_ASSERT(offsetof(oxccl_configuration, world_size) == 60, "oxccl_configuration.world_size");
OXCCL_ASSERT(offsetof(oxccl_configuration, timeout_ms) == 64, "oxccl_configuration.timeout_ms");
OXCCL_ASSERT(sizeof(oxccl_buffer) == 104, "size of oxccl_buffer");
OXCCL_ASSERT(offsetof(oxccl_buffer, size) == 0, "oxccl_buffer.size");
OXCCL_ASSERT(offsetof(oxccl_buffer, ptr) == 8, "oxccl_buffer.ptr");
OXCCL_ASSERT(offsetof(oxccl_buffer, bytes) == 16, "oxccl_buffer.bytes");
OXCCL_ASSERT(offsetof(oxccl_buffer, count) == 24, "oxccl_buffer.count");
OXCCL_ASSERT(offsetof(oxccl_buffer, dtype) == 32, "oxccl_buffer.dtype");
OXCCL_ASSERT(offsetof(oxccl_buffer, reserved) == 36, "oxccl_buffer.reserved");
OXCCL_ASSERT(offsetof(oxccl_buffer, device) == 40, "oxccl_buffer.device");
OXCCL_ASSERT(offsetof(oxccl_buffer, shape) == 64, "oxccl_buffer.shape");
OXCCL_ASSERT(offsetof(oxccl_buffer, shape_len) == 72, "oxccl_buffer.shape_len");
OXCCL_ASSERT(offsetof(oxccl_buffer, owner) == 80, "oxccl_buffer.owner");
OXCCL_ASSERT(offsetof(oxccl_buffer, retain) == 88, "oxccl_buffer.retain");
OXCCL_ASSERT(offsetof(oxccl_buffer, release) == 96, "oxccl_buffer.release");
OXCCL_ASSERT(sizeof(oxccl_operation) == 144, "size of oxccl_operation");
OXCCL_ASSERT(offsetof(oxccl_operation, size) == 0, "oxccl_operation.size");
OXCCL_ASSERT(offsetof(oxccl_operation, kind) == 8, "oxccl_operation.kind");
OXCCL_ASSERT(offsetof(oxccl_operation, reduce) == 12, "oxccl_operation.reduce");
OXCCL_ASSERT(offsetof(oxccl_operation, factor) == 16, "oxccl_operation.factor");
OXCCL_ASSERT(offsetof(oxccl_operation, root) == 24, "oxccl_operation.root");
OXCCL_ASSERT(offsetof(oxccl_operation, peer) == 28, "oxccl_operation.peer");
OXCCL_ASSERT(offsetof(oxccl_operation, tag) == 32, "oxccl_operation.tag");
OXCCL_ASSERT(offsetof(oxccl_operation, wait_all) == 36, "oxccl_operation.wait_all");
OXCCL_ASSERT(offsetof(oxccl_operation, contribute) == 40, "oxccl_operation.contribute");
OXCCL_ASSERT(offsetof(oxccl_operation, input_count) == 44, "oxccl_operation.input_count");
OXCCL_ASSERT(offsetof(oxccl_operation, buffers) == 48, "oxccl_operation.buffers");
OXCCL_ASSERT(offsetof(oxccl_operation, buffer_count) == 56, "oxccl_operation.buffer_count");
OXCCL_ASSERT(offsetof(oxccl_operation, input_splits) == 64, "oxccl_operation.input_splits");
OXCCL_ASSERT(offsetof(oxccl_operation, input_split_count) == 72, "oxccl_operation.input_split_count");
OXCCL_ASSERT(offsetof(oxccl_operation, output_splits) == 80, "oxccl_operation.output_splits");
OXCCL_ASSERT(offsetof(oxccl_operation, output_split_count) == 88, "oxccl_operation.output_split_count");
OXCCL_ASSERT(offsetof(oxccl_operation, children) == 96, "oxccl_operation.children");
OXCCL_ASSERT(offsetof(oxccl_operation, child_count) == 104, "oxccl_operation.child_count");
OXCCL_ASSERT(offsetof(oxccl_operation, buffer_stride) == 112, "oxccl_operation.buffer_stride");
OXCCL_ASSERT(offsetof(oxccl_operation, child_stride) == 120, "oxccl_operation.child_stride");
OXCCL_ASSERT(offsetof(oxccl_operation, timeout_ms) == 128, "oxccl_operation.timeout_ms");
OXCCL_ASSERT(offsetof(oxccl_operation, stream) == 136, "oxccl_operation.stream");
OXCCL_ASSERT(sizeof(oxccl_outcome) == 32, "size of oxccl_outcome");
OXCCL_ASSERT(offsetof(oxccl_outcome, size) == 0, "oxccl_outcome.size");
OXCCL_ASSERT(offsetof(oxccl_outcome, status) == 8, "oxccl_outcome.status");
OXCCL_ASSERT(offsetof(oxccl_outcome, source) == 12, "oxccl_outcome.source");
OXCCL_ASSERT(offsetof(oxccl_outcome, contributors) == 16, "oxccl_outcome.contributors");
OXCCL_ASSERT(offsetof(oxccl_outcome, reserved) == 20, "oxccl_outcome.reserved");
OXCCL_ASSERT(offsetof(oxccl_outcome, fault) == 24, "oxccl_outcome.fault");
OXCCL_ASSERT(sizeof(oxccl_completion) == 32, "size of oxccl_completion");
OXCCL_ASSERT(offsetof(oxccl_completion, size) == 0, "oxccl_completion.size");
OXCCL_ASSERT(offsetof(oxccl_completion, ctx) == 8, "oxccl_completion.ctx");
OXCCL_ASSERT(offsetof(oxccl_completion, complete) == 16, "oxccl_completion.complete");
OXCCL_ASSERT(offsetof(oxccl_completion, recorded) == 24, "oxccl_completion.recorded");
OXCCL_ASSERT(sizeof(oxccl_work_handle) == 48, "size of oxccl_work_handle");
OXCCL_ASSERT(offsetof(oxccl_work_handle, size) == 0, "oxccl_work_handle.size");
OXCCL_ASSERT(offsetof(oxccl_work_handle, ctx) == 8, "oxccl_work_handle.ctx");
OXCCL_ASSERT(offsetof(oxccl_work_handle, flags) == 16, "oxccl_work_handle.flags");
OXCCL_ASSERT(offsetof(oxccl_work_handle, reserved) == 20, "oxccl_work_handle.reserved");
OXCCL_ASSERT(offsetof(oxccl_work_handle, poll) == 24, "oxccl_work_handle.poll");
OXCCL_ASSERT(offsetof(oxccl_work_handle, abort) == 32, "oxccl_work_handle.abort");
OXCCL_ASSERT(offsetof(oxccl_work_handle, close) == 40, "oxccl_work_handle.close");
OXCCL_ASSERT(sizeof(oxccl_traffic) == 24, "size of oxccl_traffic");
OXCCL_ASSERT(offsetof(oxccl_traffic, size) == 0, "oxccl_traffic.size");
OXCCL_ASSERT(offsetof(oxccl_traffic, sent) == 8, "oxccl_traffic.sent");
OXCCL_ASSERT(offsetof(oxccl_traffic, received) == 16, "oxccl_traffic.received");
OXCCL_ASSERT(sizeof(oxccl_group) == 104, "size of oxccl_group");
OXCCL_ASSERT(offsetof(oxccl_group, size) == 0, "oxccl_group.size");
OXCCL_ASSERT(offsetof(oxccl_group, ctx) == 8, "oxccl_group.ctx");
OXCCL_ASSERT(offsetof(oxccl_group, info) == 16, "oxccl_group.info");
OXCCL_ASSERT(offsetof(oxccl_group, capabilities) == 24, "oxccl_group.capabilities");
OXCCL_ASSERT(offsetof(oxccl_group, configure) == 32, "oxccl_group.configure");
OXCCL_ASSERT(offsetof(oxccl_group, submit) == 40, "oxccl_group.submit");
OXCCL_ASSERT(offsetof(oxccl_group, split) == 48, "oxccl_group.split");
OXCCL_ASSERT(offsetof(oxccl_group, abort) == 56, "oxccl_group.abort");
OXCCL_ASSERT(offsetof(oxccl_group, error) == 64, "oxccl_group.error");
OXCCL_ASSERT(offsetof(oxccl_group, shutdown) == 72, "oxccl_group.shutdown");
OXCCL_ASSERT(offsetof(oxccl_group, traffic) == 80, "oxccl_group.traffic");
OXCCL_ASSERT(offsetof(oxccl_group, close) == 88, "oxccl_group.close");
OXCCL_ASSERT(offsetof(oxccl_group, execute) == 96, "oxccl_group.execute");
OXCCL_ASSERT(sizeof(oxccl_device_table) == 168, "size of oxccl_device_table");
OXCCL_ASSERT(offsetof(oxccl_device_table, size) == 0, "oxccl_device_table.size");
OXCCL_ASSERT(offsetof(oxccl_device_table, ctx) == 8, "oxccl_device_table.ctx");
OXCCL_ASSERT(offsetof(oxccl_device_table, count) == 16, "oxccl_device_table.count");
OXCCL_ASSERT(offsetof(oxccl_device_table, current) == 24, "oxccl_device_table.current");
OXCCL_ASSERT(offsetof(oxccl_device_table, set) == 32, "oxccl_device_table.set");
OXCCL_ASSERT(offsetof(oxccl_device_table, name) == 40, "oxccl_device_table.name");
OXCCL_ASSERT(offsetof(oxccl_device_table, synchronize) == 48, "oxccl_device_table.synchronize");
OXCCL_ASSERT(offsetof(oxccl_device_table, alloc) == 56, "oxccl_device_table.alloc");
OXCCL_ASSERT(offsetof(oxccl_device_table, copy_in) == 64, "oxccl_device_table.copy_in");
OXCCL_ASSERT(offsetof(oxccl_device_table, copy_out) == 72, "oxccl_device_table.copy_out");
OXCCL_ASSERT(offsetof(oxccl_device_table, current_stream) == 80, "oxccl_device_table.current_stream");
OXCCL_ASSERT(offsetof(oxccl_device_table, new_stream) == 88, "oxccl_device_table.new_stream");
OXCCL_ASSERT(offsetof(oxccl_device_table, stream_release) == 96, "oxccl_device_table.stream_release");
OXCCL_ASSERT(offsetof(oxccl_device_table, stream_record) == 104, "oxccl_device_table.stream_record");
OXCCL_ASSERT(offsetof(oxccl_device_table, stream_wait) == 112, "oxccl_device_table.stream_wait");
OXCCL_ASSERT(offsetof(oxccl_device_table, stream_query) == 120, "oxccl_device_table.stream_query");
OXCCL_ASSERT(offsetof(oxccl_device_table, stream_synchronize) == 128, "oxccl_device_table.stream_synchronize");
OXCCL_ASSERT(offsetof(oxccl_device_table, event_release) == 136, "oxccl_device_table.event_release");
OXCCL_ASSERT(offsetof(oxccl_device_table, event_query) == 144, "oxccl_device_table.event_query");
OXCCL_ASSERT(offsetof(oxccl_device_table, event_synchronize) == 152, "oxccl_device_table.event_synchronize");
OXCCL_ASSERT(offsetof(oxccl_device_table, native_fp8) == 160, "oxccl_device_table.native_fp8");
OXCCL_ASSERT(sizeof(oxccl_plugin) == 56, "size of oxccl_plugin");
OXCCL_ASSERT(offsetof(oxccl_plugin, size) == 0, "oxccl_plugin.size");
OXCCL_ASSERT(offsetof(oxccl_plugin, ctx) == 8, "oxccl_plugin.ctx");
OXCCL_ASSERT(offsetof(oxccl_plugin, probe) == 16, "oxccl_plugin.probe");
OXCCL_ASSERT(offsetof(oxccl_plugin, capabilities) == 24, "oxccl_plugin.capabilities");
OXCCL_ASSERT(offsetof(oxccl_plugin, create) == 32, "oxccl_plugin.create");
OXCCL_ASSERT(offsetof(oxccl_plugin, device) == 40, "oxccl_plugin.device");
OXCCL_ASSERT(offsetof(oxccl_plugin, library) == 48, "oxccl_plugin.library");
#endif

#ifdef __cplusplus
}
#endif

#endif
