//! The watch over the other ranks, as the child's link and its groups know it: `notices` keeps it.

use std::sync::Arc;

use ftcore::Error;

use crate::wire::frames::Report;

/// Where the backend does not tell the other ranks: one for all groups of a child.
pub(crate) trait Watch: Send + Sync {
    /// One more group of the child begins.
    fn join(&self);

    /// A group of this rank has failed: tells the others why, unless they know, then ends the child. Never blocks.
    fn tell(self: Arc<Self>, failure: &Error);

    /// A group leaves in good order: the others are told that this rank does if it is the last.
    fn leave(&self);

    /// Holds back a report of a loss until the store has been asked; gives it back if nothing more can be known.
    fn hold(self: Arc<Self>, report: Report) -> Option<Report>;

    /// The store was asked, or need not be any more: what is held back counts, if only as what the group had failed with before.
    fn settle(&self);
}
