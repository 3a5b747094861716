//! Following the source that others chose, too: the ranks of a replica heal from one source, whose state may differ from that of others.
//!
//! A manifest that arrives is kept, and the choice is asked for: off this task, since it goes over a store. It may name a source that has
//! not answered here, or move to another one when a rank cannot get it. Chunks that both states have are kept then.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};

use super::assembly::Assembly;
use super::download::{Download, Event};
use super::{Reach, SourceChoice};

/// Other ranks may change the choice while this one waits: then it is asked for so often.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The choice as this download knows it.
pub(super) struct Choosing {
    choice: Arc<dyn SourceChoice>,
    is_asking: bool,
    /// What was told when it was asked for last, and when.
    asked: Option<(Reach, Instant)>,
    /// The source that was chosen and has not answered here, and since when it is awaited.
    awaited: Option<(usize, Instant)>,
    /// The state is complete, and the choice moved elsewhere.
    has_moved: bool,
}

impl Choosing {
    pub(super) fn new(choice: Arc<dyn SourceChoice>) -> Self {
        Self {
            choice,
            is_asking: false,
            asked: None,
            awaited: None,
            has_moved: false,
        }
    }

    /// What is here may still turn out not to be wanted.
    pub(super) fn is_open(&self) -> bool {
        self.is_asking || self.has_moved
    }

    /// When to ask again although nothing changed here.
    pub(super) fn next_look(&self) -> Option<Instant> {
        let (_, at) = self.asked.as_ref()?;
        Some(*at + LOOK_AGAIN)
    }
}

impl Download {
    /// Asks for the choice if there is something to choose from and nothing is being followed.
    pub(super) fn consult(&mut self, now: Instant) {
        let follows = self.assembly.as_ref().is_some_and(Assembly::is_complete)
            || self.peers.iter().any(|p| p.agreed && p.lost.is_none());
        let stall = self.options.stall_timeout;
        let Some(choosing) = self.choosing.as_mut() else {
            return;
        };
        if choosing.is_asking || (follows && !choosing.has_moved) {
            return;
        }
        let mut reach = Reach::default();
        for (i, peer) in self.peers.iter().enumerate() {
            let too_slow = choosing
                .awaited
                .is_some_and(|(source, since)| source == i && now.saturating_duration_since(since) >= stall);
            let list = if peer.lost.is_some() || (too_slow && peer.manifest.is_none()) {
                &mut reach.lost
            } else if peer.manifest.is_some() {
                &mut reach.have
            } else {
                &mut reach.pending
            };
            list.push(i);
        }
        let known = |(before, at): &(Reach, Instant)| {
            *before == reach && now.saturating_duration_since(*at) < LOOK_AGAIN
        };
        if reach.have.is_empty() || choosing.asked.as_ref().is_some_and(known) {
            return;
        }
        choosing.is_asking = true;
        choosing.asked = Some((reach.clone(), now));
        let (choice, deadline, sender) = (Arc::clone(&choosing.choice), self.deadline, self.sender.clone());
        tokio::task::spawn_blocking(move || {
            let chosen = choice.follow(&reach, deadline);
            // The download may have ended.
            let _ = sender.send(Event::Chosen(chosen));
        });
    }

    pub(super) fn on_chosen(&mut self, chosen: Result<Option<usize>>) -> Result<()> {
        let Some(choosing) = self.choosing.as_mut() else {
            return Ok(());
        };
        choosing.is_asking = false;
        let Some(source) = chosen? else { return Ok(()) };
        let peer = self.peers.get(source).ok_or_else(|| {
            let what = format!("source {source} was chosen, of {}", self.peers.len());
            Error::new(ErrorKind::Internal, what)
        })?;
        if let Some(e) = &peer.lost {
            let what = format!(
                "the other ranks follow {}, which this one could not: {e}; the next attempt prefers another source",
                peer.name
            );
            return Err(Error::new(ErrorKind::PeerLost, what).with_source(e.clone()));
        }
        let Some(manifest) = peer.manifest.clone() else {
            let since = choosing.awaited.filter(|(before, _)| *before == source);
            choosing.awaited = since.or(Some((source, Instant::now())));
            return Ok(());
        };
        (choosing.awaited, choosing.has_moved) = (None, false);
        if self
            .assembly
            .as_ref()
            .is_none_or(|a| a.manifest().digest() != manifest.digest())
        {
            self.follow(&manifest)?;
        }
        Ok(())
    }

    /// True if what is here is what the choice is of. The choice cannot move to another state any more then.
    pub(super) async fn settled(&mut self) -> Result<bool> {
        let followed = self.agreed();
        let (Some(choosing), deadline) = (self.choosing.as_mut(), self.deadline) else {
            return Ok(true);
        };
        let choice = Arc::clone(&choosing.choice);
        let settle = tokio::task::spawn_blocking(move || choice.settle(&followed, deadline));
        let settled = tokio::time::timeout_at(deadline.into(), settle)
            .await
            .map_err(|_| Error::timeout("the state is here, and the other ranks did not say which is taken"))?
            .map_err(|e| Error::new(ErrorKind::Internal, format!("settling the choice ended: {e}")))??;
        (choosing.has_moved, choosing.asked) = (!settled, None);
        Ok(settled)
    }
}
