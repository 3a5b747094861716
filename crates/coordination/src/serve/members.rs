//! What a peer that has proved who it is may ask for. Without credentials every process may ask for everything, as torchft's clients expect.

use std::sync::Arc;

use identity::{Peer, Role};
use tonic::Status;
use tonic::codegen::http::Extensions;

use super::Line;

/// Who calls; `None` without credentials.
pub(crate) fn caller(extensions: &Extensions) -> Option<&Peer> {
    extensions.get::<Arc<Line>>().and_then(|line| line.peer())
}

/// Lets an incarnation of `replica_id`'s replica pass. Errors: `PermissionDenied` that names both.
pub(crate) fn in_the_name_of(extensions: &Extensions, replica_id: &str) -> Result<(), Status> {
    speaks_for(caller(extensions), replica_id)
}

/// As [`in_the_name_of`], where the caller is known already.
pub(crate) fn speaks_for(caller: Option<&Peer>, replica_id: &str) -> Result<(), Status> {
    match caller {
        Some(peer) if !peer.speaks_for(replica_id) => Err(Status::permission_denied(format!(
            "the certificate is that of {peer}, which cannot speak for replica '{}'",
            protocol::quorum::cut(replica_id)
        ))),
        _ => Ok(()),
    }
}

/// Lets the operator pass. Errors: `PermissionDenied` that names the caller.
pub(crate) fn by_the_operator(extensions: &Extensions) -> Result<(), Status> {
    match caller(extensions) {
        Some(peer) if peer.role != Role::Operator => Err(Status::permission_denied(format!(
            "only the operator of job {} may do that, and the certificate is that of {peer}",
            peer.job
        ))),
        _ => Ok(()),
    }
}
