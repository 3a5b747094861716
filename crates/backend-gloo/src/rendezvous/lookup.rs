//! Where the other ranks are: asked of the store in short looks, between which strangers are served and an abort is heard.
//!
//! A store on a busy machine may not even be reached within one look. That is not the end: the looks grow longer, and only a store that
//! stays out of reach fails the configuration.

use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result, deadline_in};

use super::card::Card;
use super::{Rendezvous, key};

/// The longest uninterrupted wait for a store that answers.
const LOOK: Duration = Duration::from_millis(50);
/// The same for one that was not reached the last time.
const LONG_LOOK: Duration = Duration::from_millis(500);
/// A store that could not be reached for this long is gone.
const GONE: Duration = Duration::from_secs(3);

impl Rendezvous<'_> {
    /// Asks the store for addresses that are needed. True if some are still unknown.
    pub(super) fn look_up(&mut self) -> Result<bool> {
        let c = self.configuration;
        let unknown: Vec<u32> = (0..c.rank)
            .filter(|&r| self.cards.get(r as usize).is_some_and(Option::is_none))
            .collect();
        if unknown.is_empty() {
            return Ok(false);
        }
        let keys: Vec<String> = unknown.iter().map(|&r| key(c, r)).collect();
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let waited = self.unreached.map_or(Duration::ZERO, |since| since.elapsed());
        let look = (LOOK + waited).min(LONG_LOOK);
        let all = match c.store.wait(&names, deadline_in(look).min(c.deadline)) {
            Ok(()) => true,
            Err(e) if e.kind() == ErrorKind::Timeout => false,
            Err(e) => return self.not_reached(e).map(|()| true),
        };
        self.unreached = None;
        for (rank, name) in unknown.into_iter().zip(names) {
            let there = all || self.present(name)?;
            if !there {
                continue;
            }
            let value = c.store.get(name, c.deadline).map_err(|e| self.named(e))?;
            let card = Card::decode(&value).ok_or_else(|| {
                self.named(Error::new(
                    ErrorKind::Protocol,
                    format!("what the store has under '{name}' is not the address of a rank"),
                ))
            })?;
            if let Some(slot) = self.cards.get_mut(rank as usize) {
                *slot = Some(card);
            }
        }
        Ok(self.cards.iter().take(c.rank as usize).any(Option::is_none))
    }

    /// The store failed a look: `error`, unless it may only be slow.
    fn not_reached(&mut self, error: Error) -> Result<()> {
        let since = *self.unreached.get_or_insert_with(Instant::now);
        let slow = error.kind() == ErrorKind::Unavailable && since.elapsed() < GONE;
        if slow && Instant::now() < self.configuration.deadline {
            return Ok(());
        }
        Err(self.named(error))
    }

    fn present(&self, name: &str) -> Result<bool> {
        let c = self.configuration;
        match c.store.check(&[name], c.deadline) {
            Ok(there) => Ok(there),
            Err(e) if e.kind() == ErrorKind::Timeout => Ok(false),
            Err(e) => Err(self.named(e)),
        }
    }
}
