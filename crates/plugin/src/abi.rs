//! The C ABI, version 1, as plain `#[repr(C)]` structs: the one description from which the C header is generated.
//!
//! Growing structs begin with `size`: how many bytes their writer knows. Fields are only ever appended; a reader takes the
//! part that both sides know and sees zero in the rest, and a function that is not there is null. The fixed ones (`Str`,
//! `Bytes`, `Sink`, `Note`, `DeviceId`) never change. The minor version that counts is the smaller of both sides'.
//!
//! Comments of fields go into the header.

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, size_of};

mod growing;
mod layout;
pub mod meaning;
mod numbers;

pub use growing::{Growing, LARGEST, read, write};
pub use layout::{FieldLayout, StructLayout};
pub use numbers::*;

macro_rules! c_structs {
    ($( $(#[doc = $doc:literal])+ $name:ident { $( $(#[doc = $fdoc:literal])+ $field:ident: $ty:ty, )+ } )+) => {
        $(
            $(#[doc = $doc])+
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $( $(#[doc = $fdoc])+ pub $field: $ty, )+ }
        )+

        /// All structs, in an order in which C can declare them.
        pub const STRUCTS: &[StructLayout] = &[ $( StructLayout {
            name: stringify!($name),
            docs: &[$($doc),+],
            size: size_of::<$name>(),
            fields: &[ $( FieldLayout {
                name: stringify!($field),
                ty: stringify!($ty),
                docs: &[$($fdoc),+],
                offset: offset_of!($name, $field),
                size: size_of::<$ty>(),
            } ),+ ],
        } ),+ ];
    };
}

c_structs! {
    /// Text in UTF-8, not ended by a zero. Valid for the call only, except where it says otherwise. Fixed.
    Str {
        /// The first byte; may be null if `len` is 0.
        ptr: *const c_char,
        /// The number of bytes.
        len: u64,
    }
    /// Bytes, valid for the call only. Fixed.
    Bytes {
        /// The first byte; may be null if `len` is 0.
        ptr: *const c_void,
        /// The number of bytes.
        len: u64,
    }
    /// Takes an answer of any length: the callee calls `write` during the call, once per value. Fixed.
    Sink {
        /// Passed back to `write`.
        ctx: *mut c_void,
        /// Copies the bytes.
        write: Option<unsafe extern "C" fn(ctx: *mut c_void, bytes: Bytes)>,
    }
    /// A pair of texts: a note (operation, in words) or a hint (name, value). Fixed.
    Note {
        /// What it is about, or the name.
        subject: Str,
        /// The text, or the value.
        text: Str,
    }
    /// A device. Fixed.
    DeviceId {
        /// The kind in lower case, `cpu` for host memory.
        kind: Str,
        /// Which one of that kind; 0 for the CPU.
        index: u32,
        /// Zero.
        reserved: u32,
    }
    /// Why a call failed. The caller makes it, with `size` set and the rest zero, and passes its address; the callee fills it
    /// in if and only if it returns something else than 0.
    Fault {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// An `oxccl_error_kind`.
        kind: u32,
        /// Which of the fields below are set, and whether a retry may help: `OXCCL_FAULT_…`.
        flags: u32,
        /// The vendor library's own code.
        code: i64,
        /// This process's rank.
        rank: u32,
        /// The other rank that is involved.
        peer: u32,
        /// The epoch of the group's configuration.
        epoch: u64,
        /// The sequence number of the operation.
        seq: u64,
        /// The number of elements.
        count: u64,
        /// An `oxccl_dtype`.
        dtype: u32,
        /// Why a backend cannot be used (`oxccl_reason`), 0 for other faults.
        reason: u32,
        /// The bytes used of `text`.
        text_len: u32,
        /// The bytes used of `detail`.
        detail_len: u32,
        /// What happened, in UTF-8.
        text: [u8; 1024],
        /// The parts of the reason, each ended by the byte 0x1f.
        detail: [u8; 512],
    }
    /// A backend that a plugin brings. Lives as long as the library.
    BackendEntry {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// The name, in lower case. Lives as long as the library.
        name: Str,
        /// The device kind that it serves. Lives as long as the library.
        device: Str,
    }
    /// The reply to `oxccl_plugin_query_v1`. The host sets `size` to what it can take and everything else to zero.
    QueryReply {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// `OXCCL_PLUGIN_MAGIC`.
        magic: u64,
        /// `OXCCL_PLUGIN_MAJOR`.
        major: u32,
        /// The oldest minor version of the ABI with which the plugin works.
        min_minor: u32,
        /// The newest minor version that the plugin knows.
        max_minor: u32,
        /// The number of `backends`.
        backend_count: u32,
        /// The number of `devices`.
        device_count: u32,
        /// Zero.
        reserved: u32,
        /// The library's own name. Lives as long as the library.
        name: Str,
        /// The library's version. Lives as long as the library.
        version: Str,
        /// What it brings. Lives as long as the library.
        backends: *const *const BackendEntry,
        /// The device kinds that it brings. Lives as long as the library.
        devices: *const Str,
    }
    /// What the host offers to a plugin. Lives as long as the process.
    Host {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// The minor version that both sides use from now on.
        minor: u32,
        /// Zero.
        reserved: u32,
        /// The host's version.
        version: Str,
        /// Logs one event. Any thread.
        log: Option<unsafe extern "C" fn(ctx: *mut c_void, level: u32, target: Str, text: Str)>,
        /// The most detailed `oxccl_level` that is read now; 0 for none. Any thread.
        log_level: Option<unsafe extern "C" fn(ctx: *mut c_void) -> u32>,
    }
    /// What a backend offers. Bits that the host does not know are ignored: it cannot call what it cannot name.
    Capabilities {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Bit n: the `oxccl_op` n is served.
        ops: u32,
        /// Bit n: the `oxccl_dtype` n can be moved, by every operation of `ops` that does not reduce.
        moves: u32,
        /// Bit n: the `oxccl_feature` n is offered.
        features: u32,
        /// The number of `reduces`, which `oxccl_reduce` counts; reductions beyond it are not offered.
        reduce_count: u32,
        /// One set of element types (as `moves`) per `oxccl_reduce`.
        reduces: *const u32,
        /// The names of the options that are honoured, `hint:NAME` for hints; `variable:REST` for an environment variable
        /// `OXCCL_<BACKEND>_REST` that the plugin reads by itself, or the host refuses it as a misspelt option.
        options: *const Str,
        /// The number of `options`.
        option_count: u64,
        /// The device kinds whose memory is served.
        devices: *const Str,
        /// The number of `devices`.
        device_count: u64,
        /// What is composed or limited: (operation, in words).
        notes: *const Note,
        /// The number of `notes`.
        note_count: u64,
    }
    /// Options with which a group is made. One that is not honoured must be refused (`OXCCL_INVALID_ARGUMENT`).
    GroupOptions {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Which of the options are set: `OXCCL_OPTION_…`.
        set: u32,
        /// If not 0, options that are not honoured are logged and dropped instead of refused.
        lenient: u32,
        /// How long an operation may take when the call names no deadline; the `timeout_ms` of an operation has it already.
        timeout_ms: i64,
        /// 0 or 1.
        is_high_priority_stream: u32,
        /// Thread blocks per cluster.
        cga_cluster_size: u32,
        /// The least number of channels.
        min_ctas: u32,
        /// The largest number of channels.
        max_ctas: u32,
        /// 0 or 1.
        split_share: u32,
        /// 0 or 1.
        blocking: u32,
        /// The traffic class of the network.
        traffic_class: u32,
        /// Zero.
        reserved: u32,
        /// The network interface or module.
        net_name: Str,
        /// The backend's own hints.
        hints: *const Note,
        /// The number of `hints`.
        hint_count: u64,
    }
    /// What a group is right now.
    Info {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// The backend's name.
        backend: Str,
        /// The group's name.
        name: Str,
        /// This process's rank; 0 while not configured.
        rank: u32,
        /// The number of ranks; 0 while not configured.
        world_size: u32,
        /// The epoch of the configuration.
        epoch: u64,
        /// The device that the group serves.
        device: DeviceId,
    }
    /// A key-value store through which the ranks find each other. Any thread may call it. The struct is valid for the call in
    /// which it is passed; a copy of it may be used as long as a reference taken with `retain` is held. Keys are non-empty
    /// UTF-8. A time-out counts from the call.
    Store {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// Takes one more reference to `ctx`.
        retain: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
        /// Gives one back.
        release: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
        /// Sets a key.
        set: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, value: Bytes, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// Waits until the key exists; the value goes to `value`.
        get: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, timeout_ms: i64, value: Sink, fault: *mut Fault) -> i32>,
        /// Adds to the integer at `key` (absent counts as 0).
        add: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, amount: i64, timeout_ms: i64, result: *mut i64, fault: *mut Fault) -> i32>,
        /// If the value is `expected` (or absent and `expected` is empty) sets `desired`; what stands then goes to `value`.
        compare_set: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, expected: Bytes, desired: Bytes, timeout_ms: i64, value: Sink, fault: *mut Fault) -> i32>,
        /// Whether all keys exist now: 0 or 1 in `result`.
        check: Option<unsafe extern "C" fn(ctx: *mut c_void, keys: *const Str, key_count: u64, timeout_ms: i64, result: *mut u32, fault: *mut Fault) -> i32>,
        /// Waits until all keys exist at the same moment.
        wait: Option<unsafe extern "C" fn(ctx: *mut c_void, keys: *const Str, key_count: u64, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// Removes a key; whether it existed is in `result`. (`delete` is a word of C++.)
        remove: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, timeout_ms: i64, result: *mut u32, fault: *mut Fault) -> i32>,
        /// Appends to the value of a key.
        append: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, value: Bytes, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// Waits until all keys exist; the values go to `values`, one call per key, in order.
        multi_get: Option<unsafe extern "C" fn(ctx: *mut c_void, keys: *const Str, key_count: u64, timeout_ms: i64, values: Sink, fault: *mut Fault) -> i32>,
        /// Sets all pairs.
        multi_set: Option<unsafe extern "C" fn(ctx: *mut c_void, keys: *const Str, values: *const Bytes, pair_count: u64, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// The number of keys.
        num_keys: Option<unsafe extern "C" fn(ctx: *mut c_void, timeout_ms: i64, result: *mut i64, fault: *mut Fault) -> i32>,
        /// The keys, sorted, one call of `keys` each.
        list: Option<unsafe extern "C" fn(ctx: *mut c_void, timeout_ms: i64, keys: Sink, fault: *mut Fault) -> i32>,
        /// Blocks until `world_size` callers have entered. A key serves for one barrier only.
        barrier: Option<unsafe extern "C" fn(ctx: *mut c_void, key: Str, world_size: u32, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// `OK` while the `configure` that passed this store is wanted; once it is cancelled, `FAILED` with the reason. Never blocks; waits
        /// for keys end by themselves then.
        wanted: Option<unsafe extern "C" fn(ctx: *mut c_void, fault: *mut Fault) -> i32>,
    }
    /// How a group is (re)configured.
    Configuration {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Where the ranks meet.
        store: *const Store,
        /// Put before every key; unique per configuration together with the epoch.
        prefix: Str,
        /// The group's name, for messages.
        name: Str,
        /// The new epoch; larger than any this group had.
        epoch: u64,
        /// This process's rank.
        rank: u32,
        /// The number of ranks, at least 1.
        world_size: u32,
        /// `configure` must return by then, counted from the call.
        timeout_ms: i64,
    }
    /// Memory of one tensor: contiguous, aligned, lent from the call until the operation has ended (`complete`, or the return
    /// of `execute`). Code that still touches it after that must hold a reference; what is never released is never freed.
    Buffer {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// The address on the device; never null, and not to be read if `bytes` is 0.
        ptr: *mut c_void,
        /// The number of bytes.
        bytes: u64,
        /// The number of elements.
        count: u64,
        /// An `oxccl_dtype`.
        dtype: u32,
        /// Zero.
        reserved: u32,
        /// Where the memory is.
        device: DeviceId,
        /// The lengths of the dimensions.
        shape: *const u64,
        /// The number of dimensions.
        shape_len: u64,
        /// Passed to `retain` and `release`.
        owner: *mut c_void,
        /// Takes a reference. Any thread.
        retain: Option<unsafe extern "C" fn(owner: *mut c_void)>,
        /// Gives one back. Any thread.
        release: Option<unsafe extern "C" fn(owner: *mut c_void)>,
    }
    /// One operation. The struct is valid for the call, the memory of the buffers longer (see `oxccl_buffer`). The host has
    /// checked ranks, counts, element types, devices and overlaps against the capabilities.
    Operation {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// An `oxccl_op`. One that is not known must be refused.
        kind: u32,
        /// An `oxccl_reduce`, or `OXCCL_NONE`.
        reduce: u32,
        /// The factor of `OXCCL_PREMUL_SUM`.
        factor: f64,
        /// The root, or `OXCCL_NONE`.
        root: u32,
        /// The other rank of a send or receive; `OXCCL_NONE` to receive from any.
        peer: u32,
        /// The tag of a send or receive.
        tag: u32,
        /// Monitored barrier: name all missing ranks (1) or the first one (0).
        wait_all: u32,
        /// 0: this rank gives the identity of the reduction and is not counted.
        contribute: u32,
        /// How many of the buffers come first as the list of inputs, where `oxccl_op` says that there is one; else 0.
        input_count: u32,
        /// The tensors, as `oxccl_op` says.
        buffers: *const Buffer,
        /// The number of `buffers`; 0 for barriers and batches.
        buffer_count: u64,
        /// How `input` of an uneven all-to-all is split, in elements; none for even.
        input_splits: *const u64,
        /// The number of `input_splits`.
        input_split_count: u64,
        /// How `output` is split.
        output_splits: *const u64,
        /// The number of `output_splits`.
        output_split_count: u64,
        /// The sends and receives of a batch.
        children: *const Operation,
        /// The number of `children`.
        child_count: u64,
        /// The bytes from one element of `buffers` to the next.
        buffer_stride: u64,
        /// The bytes from one element of `children` to the next.
        child_stride: u64,
        /// The operation must end by then, counted from the call.
        timeout_ms: i64,
        /// A stream of this plugin's own device kind after whose present end the inputs are ready; null: they are.
        stream: *mut c_void,
    }
    /// How an operation ended.
    Outcome {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// 0: it succeeded.
        status: i32,
        /// Receives: who sent, or `OXCCL_NONE`.
        source: u32,
        /// Reductions: how many ranks contributed, the world size at most; 0 if not known, as without CONTRIBUTORS.
        contributors: u32,
        /// Zero.
        reserved: u32,
        /// Why it failed; null if it succeeded. Read before `complete` returns, or after `execute` has: then the fault of that call, or one that stays.
        fault: *const Fault,
    }
    /// How a plugin reports on an operation. Copied by the plugin.
    Completion {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// The operation has ended. Exactly once, from any thread, also from within `submit`; never if `submit` refused. The group's `close` may come
        /// before this returns. `ctx`
        /// and the buffers must not be used afterwards, except buffers that are still retained.
        complete: Option<unsafe extern "C" fn(ctx: *mut c_void, outcome: *const Outcome)>,
        /// Need not be called. Before `complete`: the operation is enqueued, `event` (of this plugin's device kind, given away) will be
        /// reached when the device has finished it.
        recorded: Option<unsafe extern "C" fn(ctx: *mut c_void, event: *mut c_void)>,
    }
    /// A submitted operation, filled in by `submit`; may be left all zero, and each function may be null. `complete` may come before `submit` returns.
    WorkHandle {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// `OXCCL_WORK_POLLED`, or 0.
        flags: u32,
        /// Zero.
        reserved: u32,
        /// Makes progress without blocking (one thread polls for all groups); calls `complete` when the operation has ended.
        /// Called from one thread, not after `complete`.
        poll: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
        /// Ends the operation; null: the group is aborted instead.
        abort: Option<unsafe extern "C" fn(ctx: *mut c_void, reason: Str)>,
        /// The host will not use `ctx` any more. Exactly once, after `complete` or from within it.
        close: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
    }
    /// Bytes moved by a group so far.
    Traffic {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// To other ranks.
        sent: u64,
        /// From other ranks.
        received: u64,
    }
    /// A group of ranks. All functions may be called from any thread; see Order above. `abort`, `info` and `close` must not block.
    Group {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// Says what it is now: calls `reply` once, during the call.
        info: Option<unsafe extern "C" fn(ctx: *mut c_void, reply_ctx: *mut c_void, reply: Option<unsafe extern "C" fn(reply_ctx: *mut c_void, info: *const Info)>)>,
        /// Says what it offers: calls `reply` once, during the call.
        capabilities: Option<unsafe extern "C" fn(ctx: *mut c_void, reply_ctx: *mut c_void, reply: Option<unsafe extern "C" fn(reply_ctx: *mut c_void, capabilities: *const Capabilities)>)>,
        /// Connects the ranks at a new epoch, ending whatever an earlier one left over.
        configure: Option<unsafe extern "C" fn(ctx: *mut c_void, configuration: *const Configuration, fault: *mut Fault) -> i32>,
        /// Starts an operation. 0: it is accepted and will complete; else it is refused and nothing was touched. It may carry the
        /// operation out within the call: the caller's thread waits then, and nothing can be aborted meanwhile.
        submit: Option<unsafe extern "C" fn(ctx: *mut c_void, operation: *const Operation, completion: *const Completion, work: *mut WorkHandle, fault: *mut Fault) -> i32>,
        /// A collective call: a group of the ranks with the same colour, ordered by (key, rank). `has_color` 0: none for this
        /// rank, `made` becomes 0. May be null: groups cannot be split.
        split: Option<unsafe extern "C" fn(ctx: *mut c_void, has_color: u32, color: u32, key: u32, timeout_ms: i64, group: *mut Group, made: *mut u32, fault: *mut Fault) -> i32>,
        /// Ends all pending operations and poisons the group. Without ABORT it may do nothing, if each operation ends at its time-out.
        abort: Option<unsafe extern "C" fn(ctx: *mut c_void, reason: Str)>,
        /// The first failure since `configure`: 1 and the fault, or 0. May be null: the host knows only what operations say.
        error: Option<unsafe extern "C" fn(ctx: *mut c_void, fault: *mut Fault) -> i32>,
        /// Waits for pending operations, then aborts the rest. Calls are refused with INVALID_STATE until the next `configure`.
        shutdown: Option<unsafe extern "C" fn(ctx: *mut c_void, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// Bytes moved so far, headers included. May be null: 0 is reported then, which the conformance suite does not accept of a sum between ranks.
        traffic: Option<unsafe extern "C" fn(ctx: *mut c_void, traffic: *mut Traffic)>,
        /// The host will not use `ctx` any more. Exactly once. Pending operations still complete.
        close: Option<unsafe extern "C" fn(ctx: *mut c_void)>,
        /// Runs an operation to its end, on the calling thread where that is possible. When it returns, only what retained the buffers touches
        /// them. May be null: the host submits and waits.
        execute: Option<unsafe extern "C" fn(ctx: *mut c_void, operation: *const Operation, outcome: *mut Outcome, fault: *mut Fault) -> i32>,
    }
    /// A device kind that a plugin brings. Lives as long as the process. Streams and events are handles of the plugin; a handle
    /// that a function hands out belongs to the host until it is released. Any thread.
    DeviceTable {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// How many devices there are now.
        count: Option<unsafe extern "C" fn(ctx: *mut c_void) -> u32>,
        /// The calling thread's current device.
        current: Option<unsafe extern "C" fn(ctx: *mut c_void, index: *mut u32, fault: *mut Fault) -> i32>,
        /// Makes a device current on the calling thread.
        set: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32, fault: *mut Fault) -> i32>,
        /// What the device is called.
        name: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32, name: Sink, fault: *mut Fault) -> i32>,
        /// Waits for all work of a device.
        synchronize: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// Memory; the host gives it back with the buffer's `release`. `shape` of the result is ignored.
        alloc: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32, dtype: u32, shape: *const u64, shape_len: u64, buffer: *mut Buffer, fault: *mut Fault) -> i32>,
        /// Host to device, in the stream's order; returns once `from` may be reused.
        copy_in: Option<unsafe extern "C" fn(ctx: *mut c_void, from: Bytes, to: *const Buffer, stream: *mut c_void, fault: *mut Fault) -> i32>,
        /// Device to host, in the stream's order; returns once the bytes are there.
        copy_out: Option<unsafe extern "C" fn(ctx: *mut c_void, from: *const Buffer, to: *mut c_void, to_len: u64, stream: *mut c_void, fault: *mut Fault) -> i32>,
        /// The calling thread's current stream.
        current_stream: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32, stream: *mut *mut c_void, fault: *mut Fault) -> i32>,
        /// A new stream.
        new_stream: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32, high_priority: u32, stream: *mut *mut c_void, fault: *mut Fault) -> i32>,
        /// Gives a stream handle back.
        stream_release: Option<unsafe extern "C" fn(ctx: *mut c_void, stream: *mut c_void)>,
        /// Marks the present end of the stream.
        stream_record: Option<unsafe extern "C" fn(ctx: *mut c_void, stream: *mut c_void, event: *mut *mut c_void, fault: *mut Fault) -> i32>,
        /// Lets later work of the stream start after the event, without blocking the host.
        stream_wait: Option<unsafe extern "C" fn(ctx: *mut c_void, stream: *mut c_void, event: *mut c_void, fault: *mut Fault) -> i32>,
        /// Whether nothing is left to do: 0 or 1 in `done`.
        stream_query: Option<unsafe extern "C" fn(ctx: *mut c_void, stream: *mut c_void, done: *mut u32, fault: *mut Fault) -> i32>,
        /// Waits until the stream is empty.
        stream_synchronize: Option<unsafe extern "C" fn(ctx: *mut c_void, stream: *mut c_void, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// Gives an event handle back.
        event_release: Option<unsafe extern "C" fn(ctx: *mut c_void, event: *mut c_void)>,
        /// Whether it was reached: 0 or 1 in `done`.
        event_query: Option<unsafe extern "C" fn(ctx: *mut c_void, event: *mut c_void, done: *mut u32, fault: *mut Fault) -> i32>,
        /// Waits until it is reached.
        event_synchronize: Option<unsafe extern "C" fn(ctx: *mut c_void, event: *mut c_void, timeout_ms: i64, fault: *mut Fault) -> i32>,
        /// 1 if the device computes in FP8 by itself.
        native_fp8: Option<unsafe extern "C" fn(ctx: *mut c_void, index: u32) -> u32>,
    }
    /// An opened plugin. Lives as long as the process. Backends and devices are named by their place in the query's lists. Any
    /// thread.
    Plugin {
        /// The bytes that the writer of this struct knows.
        size: u64,
        /// Passed back to the functions.
        ctx: *mut c_void,
        /// Whether the backend can be used here and now; the fault says why not.
        probe: Option<unsafe extern "C" fn(ctx: *mut c_void, backend: u32, fault: *mut Fault) -> i32>,
        /// Says what the backend's groups offer: calls `reply` once, during the call.
        capabilities: Option<unsafe extern "C" fn(ctx: *mut c_void, backend: u32, reply_ctx: *mut c_void, reply: Option<unsafe extern "C" fn(reply_ctx: *mut c_void, capabilities: *const Capabilities)>)>,
        /// Makes an unconfigured group.
        create: Option<unsafe extern "C" fn(ctx: *mut c_void, backend: u32, device: DeviceId, options: *const GroupOptions, group: *mut Group, fault: *mut Fault) -> i32>,
        /// Hands out a device kind. May be null if the query lists none.
        device: Option<unsafe extern "C" fn(ctx: *mut c_void, device: u32, table: *mut DeviceTable, fault: *mut Fault) -> i32>,
        /// The vendor library behind a backend, in words; nothing is written if there is none. May be null.
        library: Option<unsafe extern "C" fn(ctx: *mut c_void, backend: u32, text: Sink)>,
    }
}

/// The type of `oxccl_plugin_query_v1`: fills in `reply`, touches nothing else, and returns 0.
pub type QueryFn = unsafe extern "C" fn(reply: *mut QueryReply) -> i32;
/// The type of `oxccl_plugin_open_v1`: starts the plugin. Called at most once per process.
pub type OpenFn = unsafe extern "C" fn(host: *const Host, plugin: *mut Plugin, fault: *mut Fault) -> i32;
