//! The one error type of the workspace: kind × operation × context × source.
//!
//! Kinds are few and tell the caller what to do (`ErrorKind::advice`). The context names what one needs to act:
//! rank, peer, epoch, sequence number, dtype, count. Backends keep their raw code and text beside it.

use std::fmt;
use std::sync::Arc;

use crate::registry::Unavailable;

use crate::Epoch;

/// What went wrong, in terms of what the caller can do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call itself is wrong (size, dtype, rank, split, alias …). Nothing was sent; fix the arguments.
    InvalidArgument,
    /// This backend, build or machine does not offer that. Ask `capabilities()` first or choose another backend.
    Unsupported,
    /// The group or object is not in a state that allows the call (not configured, already shut down, …).
    InvalidState,
    /// A deadline passed. The message says what was being waited for and who was missing.
    Timeout,
    /// A peer is gone: its connection closed or reset, or its process ended. Reconfigure without it.
    PeerLost,
    /// A peer (or a server) sent something that is not the protocol: wrong magic, version, length or checksum.
    Protocol,
    /// Ranks called different collectives, or the same one with other dtype, count or root. Both sides are named.
    Mismatch,
    /// The operation was ended by `abort`; the reason is kept.
    Aborted,
    /// The group failed earlier and was not configured again; the first cause is the source.
    Poisoned,
    /// A name (backend, key, member, file) is not known.
    NotFound,
    /// It exists already and is not the same (registration in strict mode, address in use).
    Conflict,
    /// A service cannot be reached or is not ready; trying again later may work.
    Unavailable,
    /// The operating system refused; the source has its error.
    Io,
    /// State read from elsewhere is damaged: a hash, a header or a length does not fit.
    Corrupt,
    /// A vendor library reported an error; `code` and the message are its own.
    Backend,
    /// A defect: in oxccl, or in a plugin that the text names. Please report it.
    Internal,
}

impl ErrorKind {
    /// True if the same call may succeed later, or after the group was configured again, without changing it.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Timeout | Self::PeerLost | Self::Aborted | Self::Poisoned | Self::Unavailable | Self::Io
        )
    }

    /// A short text on what to do.
    pub fn advice(self) -> &'static str {
        match self {
            Self::InvalidArgument => "fix the arguments; nothing was done",
            Self::Unsupported => {
                "choose another backend, or do without; capabilities() tells what a backend offers"
            }
            Self::InvalidState => "configure the group (again) first",
            Self::Timeout => "raise the deadline, or look at the ranks named",
            Self::PeerLost => "configure the group without that peer",
            Self::Protocol => "check that both sides run compatible versions",
            Self::Mismatch => "call the same collective with the same dtype, count and root on every rank",
            Self::Aborted | Self::Poisoned => "configure the group again",
            Self::NotFound => "check the name",
            Self::Conflict => "choose another name or address",
            Self::Unavailable => "check that the service runs and is reachable, then try again",
            Self::Io => "see the operating system's error",
            Self::Corrupt => "fetch the state again from another source",
            Self::Backend => "see the library's own text and code",
            Self::Internal => {
                "please report it, with this text, to the authors of oxccl or of the plugin that it names"
            }
        }
    }
}

/// Where it happened. Every field is optional; `Display` prints the ones that are set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ErrorContext {
    /// The operation: `"all_reduce"`, `"store.wait"`, `"quorum"`, …
    pub op: Option<&'static str>,
    /// This process's rank in the group.
    pub rank: Option<u32>,
    /// The other rank that is involved.
    pub peer: Option<u32>,
    /// The peer's address, where one is known.
    pub peer_address: Option<String>,
    /// The epoch of the group's configuration.
    pub epoch: Option<Epoch>,
    /// The sequence number of the collective in its group.
    pub seq: Option<u64>,
    /// The element type.
    pub dtype: Option<crate::DType>,
    /// The number of elements.
    pub count: Option<usize>,
}

#[derive(Debug)]
struct Inner {
    kind: ErrorKind,
    message: String,
    context: ErrorContext,
    code: Option<i64>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// The error type of every oxccl crate. Cheap to clone, so that one cause can fail many operations.
///
/// `{}` is one line: what happened, to what. `{:?}` is for people too, since `fn main() -> Result<()>` prints it: the kind, that line, what to
/// do, and the causes. `{:#?}` has the fields.
///
/// ```
/// use ftcore::{Error, ErrorKind};
///
/// let error = Error::new(ErrorKind::Timeout, "not done by its deadline").with_op("all_reduce").with_peer(1);
/// assert_eq!(error.kind(), ErrorKind::Timeout);
/// assert!(error.to_string().starts_with("all_reduce") && error.to_string().contains("peer 1"));
/// println!("{}", error.advice()); // what to do
/// ```
#[derive(Clone)]
pub struct Error(Arc<Inner>);

/// `std::result::Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A new error with `kind` and a message that says what happened (not what to do: the kind knows that).
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Arc::new(Inner {
            kind,
            message: message.into(),
            context: ErrorContext::default(),
            code: None,
            source: None,
        }))
    }

    /// Shorthand for [`ErrorKind::InvalidArgument`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::InvalidArgument, message)
    }

    /// Shorthand for [`ErrorKind::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Shorthand for [`ErrorKind::Timeout`].
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Timeout, message)
    }

    /// An error of the operating system, with what was being done.
    pub fn io(what: impl fmt::Display, source: std::io::Error) -> Self {
        Self::new(ErrorKind::Io, format!("{what}: {source}")).with_source(source)
    }

    fn edit(mut self, f: impl FnOnce(&mut Inner)) -> Self {
        if Arc::get_mut(&mut self.0).is_none() {
            // Shared already: the copy keeps the kind, the text, the context and the source.
            let i = &self.0;
            self.0 = Arc::new(Inner {
                kind: i.kind,
                message: i.message.clone(),
                context: i.context.clone(),
                code: i.code,
                source: i.source.clone(),
            });
        }
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            f(inner);
        }
        self
    }

    /// Names the operation.
    #[must_use]
    pub fn with_op(self, op: &'static str) -> Self {
        self.edit(|i| i.context.op = Some(op))
    }

    /// Names this process's rank.
    #[must_use]
    pub fn with_rank(self, rank: u32) -> Self {
        self.edit(|i| i.context.rank = Some(rank))
    }

    /// Names the peer.
    #[must_use]
    pub fn with_peer(self, peer: u32) -> Self {
        self.edit(|i| i.context.peer = Some(peer))
    }

    /// Names the peer's address.
    #[must_use]
    pub fn with_peer_address(self, address: impl Into<String>) -> Self {
        let address = address.into();
        self.edit(|i| i.context.peer_address = Some(address))
    }

    /// Names the epoch.
    #[must_use]
    pub fn with_epoch(self, epoch: Epoch) -> Self {
        self.edit(|i| i.context.epoch = Some(epoch))
    }

    /// Names the collective's sequence number.
    #[must_use]
    pub fn with_seq(self, seq: u64) -> Self {
        self.edit(|i| i.context.seq = Some(seq))
    }

    /// Names dtype and element count.
    #[must_use]
    pub fn with_data(self, dtype: crate::DType, count: usize) -> Self {
        self.edit(|i| {
            i.context.dtype = Some(dtype);
            i.context.count = Some(count);
        })
    }

    /// Adds to what happened.
    #[must_use]
    pub(crate) fn with_more(self, text: &str) -> Self {
        self.edit(|i| i.message.push_str(text))
    }

    /// Keeps the library's or server's own code.
    #[must_use]
    pub fn with_code(self, code: i64) -> Self {
        self.edit(|i| i.code = Some(code))
    }

    /// Keeps the cause.
    #[must_use]
    pub fn with_source(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        self.edit(|i| i.source = Some(Arc::new(source)))
    }

    /// The kind: what the caller can do.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// See [`ErrorKind::is_retryable`].
    pub fn is_retryable(&self) -> bool {
        self.0.kind.is_retryable()
    }

    /// A short text on what to do: that of the reason why a backend cannot be used, if the error carries one, else that of the kind.
    pub fn advice(&self) -> &'static str {
        Unavailable::of(self).map_or(self.kind().advice(), Unavailable::advice)
    }

    /// What happened, without context.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// Where it happened.
    pub fn context(&self) -> &ErrorContext {
        &self.0.context
    }

    /// The library's own code, if there is one.
    pub fn code(&self) -> Option<i64> {
        self.0.code
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.0.context;
        let mut parts: Vec<String> = Vec::new();
        if let Some(d) = c.dtype {
            parts.push(d.to_string());
        }
        if let Some(n) = c.count {
            parts.push(format!("{n} elements"));
        }
        if let Some(e) = c.epoch {
            parts.push(format!("epoch {e}"));
        }
        if let Some(op) = c.op {
            write!(f, "{op}")?;
            if let Some(s) = c.seq {
                write!(f, " #{s}")?;
            }
            if !parts.is_empty() {
                write!(f, " ({})", parts.join(", "))?;
            }
            if let Some(r) = c.rank {
                write!(f, " on rank {r}")?;
            }
            f.write_str(": ")?;
        } else if !parts.is_empty() || c.rank.is_some() {
            if let Some(r) = c.rank {
                parts.push(format!("rank {r}"));
            }
            write!(f, "[{}] ", parts.join(", "))?;
        }
        match (c.peer, c.peer_address.as_deref()) {
            (Some(p), Some(a)) => write!(f, "peer {p} ({a}): ")?,
            (Some(p), None) => write!(f, "peer {p}: ")?,
            (None, Some(a)) => write!(f, "{a}: ")?,
            (None, None) => {}
        }
        f.write_str(&self.0.message)?;
        if let Some(code) = self.0.code {
            write!(f, " (code {code})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return f.debug_tuple("Error").field(&self.0).finish();
        }
        let mut told = self.to_string();
        write!(f, "{:?}: {told}; {}", self.kind(), self.advice())?;
        let mut cause = std::error::Error::source(self);
        while let Some(c) = cause {
            // A cause whose text is part of what it caused says nothing more.
            let text = c.to_string();
            if !told.contains(&text) {
                write!(f, "\n  caused by: {text}")?;
            }
            told = text;
            cause = c.source();
        }
        Ok(())
    }
}

/// By hand, as `Display` and `Debug` are: the text is made of the parts that are known, and the source is behind the shared pointer.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0
            .source
            .as_deref()
            .map(|e| e as &(dyn std::error::Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_main_prints_can_be_read_and_ends_with_the_causes() {
        let refused = std::io::Error::other("refused by the kernel");
        let lost = Error::io("cannot connect to 10.0.0.4:4103", refused);
        let e = Error::new(ErrorKind::Unavailable, "the lighthouse does not answer").with_source(lost);
        assert_eq!(
            format!("{e:?}"),
            "Unavailable: the lighthouse does not answer; check that the service runs and is reachable, then try again\n  \
             caused by: cannot connect to 10.0.0.4:4103: refused by the kernel"
        );
        assert!(format!("{e:#?}").contains("context: ErrorContext"));
    }

    #[test]
    fn display_names_op_rank_peer_epoch_dtype_and_count() {
        let e = Error::new(ErrorKind::PeerLost, "closed the connection after 12 of 64 chunks")
            .with_op("all_reduce")
            .with_seq(41)
            .with_data(crate::DType::F32, 1_048_576)
            .with_epoch(Epoch(7))
            .with_rank(2)
            .with_peer(1)
            .with_peer_address("10.0.0.4:4103");
        assert_eq!(
            e.to_string(),
            "all_reduce #41 (f32, 1048576 elements, epoch 7) on rank 2: peer 1 (10.0.0.4:4103): closed the \
             connection after 12 of 64 chunks"
        );
        assert!(e.is_retryable());
    }

    #[test]
    fn adding_context_to_a_shared_error_leaves_the_other_copy_alone() {
        let a = Error::timeout("waited");
        let b = a.clone().with_rank(3);
        assert_eq!(a.context().rank, None);
        assert_eq!(b.context().rank, Some(3));
    }
}
