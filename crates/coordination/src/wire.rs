//! x
/// a
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod torchft { tonic::include_proto!("torchft"); }
/// b
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub(crate) mod oxccl { tonic::include_proto!("oxccl"); }
