//! Ranks that have gone while something pending needs them: when that is certain, and who is blamed.
//!
//! What a rank sent before it went is in its ring, or comes over its connection before that ends. So a fate counts for what is read after it was
//! heard of, and not before a read has found nothing more.

use std::time::Instant;

use ftcore::{Error, ErrorKind, Result};

use super::{Channels, End, Inbox, Out};
use crate::p2p::Way;
use crate::peer::{GRACE, LAST_GRACE};
use crate::queue::Shared;

impl End {
    /// True if nothing more comes over its connection, and whatever it had to say about that was heard. `ended`: the connection is read to its end.
    fn is_certain(&mut self, ended: bool, shared: &Shared) -> bool {
        if ended && self.fate.is_some() {
            return true;
        }
        let now = Instant::now();
        if self.silent.is_none() {
            shared.wake();
        }
        let (since, looks) = *self.silent.get_or_insert_with(|| (now, shared.looks()));
        let waited = now.duration_since(since);
        match &self.fate {
            // The end of its connection comes behind all that it sent, which may be a lot.
            Some(fate) if fate.left => waited >= LAST_GRACE,
            Some(_) => waited >= GRACE,
            None if waited < GRACE => false,
            None => {
                // One look may have begun before.
                let looked = shared.looks() >= looks + 2;
                if !looked {
                    shared.wake();
                }
                looked
            }
        }
    }
}

impl Channels {
    /// Takes in what the engine's thread has learnt about the ranks since.
    pub(super) fn take_in(&mut self, shared: &Shared) {
        if !shared.in_trouble() {
            return;
        }
        for (rank, fate) in shared.fates_from(self.fates) {
            self.fates += 1;
            if let Some(end) = self.ends.get_mut(rank as usize) {
                end.fate = Some(fate);
            }
        }
    }

    /// A rank that something pending needs has gone, or its loss was reported: nothing more comes. What may come of any rank needs one that is there.
    pub(crate) fn judge(&mut self, shared: &Shared) -> Result<()> {
        let any = self.messages.needs_any();
        let mut still_there = false;
        let mut gone_last = None;
        let channels = self.inboxes.iter().zip(&self.outboxes);
        for ((inbox, outbox), end) in channels.zip(&mut self.ends) {
            let (Some(inbox), Some(outbox)) = (inbox, outbox) else {
                continue;
            };
            let (read, written) = match (inbox, &outbox.out) {
                (Inbox::Remote(inbox), Out::Remote(out)) => {
                    (inbox.link.read_closed.as_ref(), out.link.write_closed.as_ref())
                }
                _ => (None, None),
            };
            let closed = read.or(written);
            let gone = end.fate.is_some() || closed.is_some();
            let needed = self.messages.needs(outbox.rank);
            if !gone || end.heard || !(needed || any) {
                still_there = true;
                continue;
            }
            // What a rank said is told before it is told that it has gone.
            let report = shared.report();
            let reported = end.fate.is_some() && report.is_some();
            let local = matches!(inbox, Inbox::Local(_));
            if !reported && !local && !end.is_certain(read.is_some(), shared) {
                still_there = true;
                continue;
            }
            let error = report.unwrap_or_else(|| {
                let how = match (&end.fate, closed) {
                    (Some(fate), _) if fate.left => format!("left the group ({})", fate.text),
                    (Some(fate), _) => fate.text.clone(),
                    (None, closed) => closed.cloned().unwrap_or_default(),
                };
                let error = outbox.blame(Error::new(ErrorKind::PeerLost, how));
                error.with_epoch(self.place.epoch)
            });
            if needed {
                return Err(error);
            }
            gone_last = Some(error);
        }
        match gone_last.filter(|_| !still_there) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
