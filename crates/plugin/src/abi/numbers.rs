//! The numbers of the ABI: versions, results, flags and codes, with their names in C where those are not made from the name here.

/// First in the reply to a query: `OXCCLPLG` as bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"OXCCLPLG");
/// The major version; it is in the names of the entry points too.
pub const MAJOR: u32 = 1;
/// The newest minor version that this build speaks.
pub const MINOR: u32 = 0;
/// The oldest minor version that this build speaks.
pub const MINIMUM_MINOR: u32 = 0;
/// The pure entry point.
pub const QUERY: &str = "oxccl_plugin_query_v1";
/// The entry point that starts the plugin.
pub const OPEN: &str = "oxccl_plugin_open_v1";
/// "No such number" in the optional 32-bit fields (root, peer, source, reduce, dtype).
pub const NONE: u32 = u32::MAX;

/// What a function returns when it did its work; anything else means that the fault says why not.
pub const OK: i32 = 0;
/// What a function returns when it did not; the fault says why.
pub const FAILED: i32 = 1;

/// `WorkHandle::flags`: the host calls `poll` until the operation has ended.
pub const WORK_POLLED: u32 = 1;

/// `Fault::flags`: `code` is set.
pub const FAULT_CODE: u32 = 1;
/// `Fault::flags`: `rank` is set.
pub const FAULT_RANK: u32 = 2;
/// `Fault::flags`: `peer` is set.
pub const FAULT_PEER: u32 = 4;
/// `Fault::flags`: `epoch` is set.
pub const FAULT_EPOCH: u32 = 8;
/// `Fault::flags`: `seq` is set.
pub const FAULT_SEQ: u32 = 16;
/// `Fault::flags`: `dtype` and `count` are set.
pub const FAULT_DATA: u32 = 32;
/// `Fault::flags`: the same call may succeed later.
pub const FAULT_RETRYABLE: u32 = 64;

/// `GroupOptions::set`: bit of each typed option.
pub const OPTION_HIGH_PRIORITY: u32 = 1;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_CGA_CLUSTER_SIZE: u32 = 2;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_MIN_CTAS: u32 = 4;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_MAX_CTAS: u32 = 8;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_NET_NAME: u32 = 16;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_SPLIT_SHARE: u32 = 32;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_BLOCKING: u32 = 64;
/// See [`OPTION_HIGH_PRIORITY`].
pub const OPTION_TRAFFIC_CLASS: u32 = 128;

/// Codes of `Fault::kind`, with their names in C. 0 stays free: a fault that was not filled in.
pub const ERROR_KINDS: [(u32, &str); 16] = [
    (1, "INVALID_ARGUMENT"),
    (2, "UNSUPPORTED"),
    (3, "INVALID_STATE"),
    (4, "TIMEOUT"),
    (5, "PEER_LOST"),
    (6, "PROTOCOL"),
    (7, "MISMATCH"),
    (8, "ABORTED"),
    (9, "POISONED"),
    (10, "NOT_FOUND"),
    (11, "CONFLICT"),
    (12, "UNAVAILABLE"),
    (13, "IO"),
    (14, "CORRUPT"),
    (15, "BACKEND"),
    (16, "INTERNAL"),
];

/// Codes of `Fault::reason` that a plugin gives, with their names in C (`ftcore::registry::Unavailable` has the parts).
pub const REASONS: [(u32, &str); 7] = [
    (1, "LIBRARY_NOT_FOUND"),
    (2, "LIBRARY_NOT_LOADABLE"),
    (3, "SYMBOL_MISSING"),
    (4, "VERSION_TOO_OLD"),
    (5, "VERSION_TOO_NEW"),
    (6, "NO_DEVICE"),
    (7, "INIT_FAILED"),
];
