//! What ranks tell each other through the store: how they quantise, before anything else (L12), and after a mismatch which call each of
//! them made, so that the error names those and not the byte collectives that carried them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ftcore::{Configuration, Error, ErrorKind, Fingerprint, Result, deadline_in, time_left};

/// How long one look at the store takes before an order to stop is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// How long the calls of other ranks are waited for after a mismatch.
const DISPUTE: Duration = Duration::from_secs(2);

/// With this a rank that found a mismatch begins the reason for which it ends the group below, so that the others look for it too.
pub(crate) const DISPUTED: &str = "ranks called different collectives";

/// True for an error of the group below behind which there may be a mismatch of this layer's calls.
pub(crate) fn may_be_mismatch(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Mismatch => true,
        ErrorKind::Aborted => error.context().peer.is_some() && error.to_string().contains(DISPUTED),
        _ => false,
    }
}

/// What one configuration's ranks exchange.
#[derive(Clone)]
pub(crate) struct Agreement {
    configuration: Configuration,
    /// This rank's way to quantise, in words.
    mine: String,
}

/// At most 160 printable characters of another rank's bytes.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .take(160)
        .collect()
}

impl Agreement {
    /// `mine` begins with the format; ranks must have the same.
    pub(crate) fn new(configuration: &Configuration, mine: String) -> Self {
        Self {
            configuration: configuration.clone(),
            mine,
        }
    }

    fn key(&self, what: &str, rank: u32) -> String {
        let c = &self.configuration;
        format!("{}/quant/{}/{what}/{rank}", c.prefix, c.epoch)
    }

    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.configuration.rank;
        (0..self.configuration.world_size).filter(move |r| *r != own)
    }

    /// Says how this rank quantises. Every rank does so before it connects, so that a rank that has connected to all finds all.
    pub(crate) fn publish(&self) -> Result<()> {
        let c = &self.configuration;
        c.store
            .set(&self.key("format", c.rank), self.mine.as_bytes(), c.deadline)
    }

    /// `Mismatch` naming both sides if `peer` said something else.
    fn compare(&self, peer: u32, theirs: &[u8]) -> Result<()> {
        if theirs == self.mine.as_bytes() {
            return Ok(());
        }
        let theirs = printable(theirs);
        // The format alone, where that is what differs.
        let (other, own) = match (theirs.split_once(','), self.mine.split_once(',')) {
            (Some((other, _)), Some((own, _))) if other != own => (other, own),
            _ => (theirs.as_str(), self.mine.as_str()),
        };
        let rank = self.configuration.rank;
        let text = format!("rank {peer} quantises as {other}, rank {rank} as {own}");
        Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer))
    }

    /// Compares this rank's way to quantise with every other rank's.
    pub(crate) fn compare_all(&self) -> Result<()> {
        let c = &self.configuration;
        let store = c.cancel.over(&c.store);
        for peer in self.peers() {
            let theirs = store.get(&self.key("format", peer), c.deadline);
            let theirs = theirs.map_err(|e| match e.kind() {
                ErrorKind::Timeout => {
                    let text = format!("waiting for rank {peer} to say how it quantises");
                    Error::timeout(text).with_peer(peer).with_source(e)
                }
                _ => e.with_peer(peer),
            })?;
            self.compare(peer, &theirs)?;
        }
        Ok(())
    }

    /// The disagreement that made connecting fail, if that was it: another rank may have seen it first and left.
    pub(crate) fn known_mismatch(&self) -> Option<Error> {
        let soon = deadline_in(Duration::from_secs(1));
        self.peers().find_map(|peer| {
            let key = self.key("format", peer);
            let store = &self.configuration.store;
            if !store.check(&[&key], soon).ok()? {
                return None;
            }
            self.compare(peer, &store.get(&key, soon).ok()?).err()
        })
    }

    /// Tells the other ranks that call number `seq`, which failed in a mismatch, was `mine` here.
    pub(crate) fn say_call(&self, seq: u64, mine: Fingerprint) -> Result<()> {
        let c = &self.configuration;
        let entry = [&seq.to_le_bytes()[..], &mine.encode()].concat();
        c.store
            .set(&self.key("call", c.rank), &entry, deadline_in(DISPUTE))
    }

    /// Who called what in place of call number `seq`, which was `mine` here and failed with `error`; that as a `Mismatch` if it cannot be found out.
    /// Gives up early if `stop` is raised.
    pub(crate) fn name_both(&self, seq: u64, mine: Fingerprint, error: &Error, stop: &AtomicBool) -> Error {
        let c = &self.configuration;
        let until = deadline_in(DISPUTE);
        let unknown = || match error.kind() {
            ErrorKind::Mismatch => error.clone(),
            _ => Error::new(ErrorKind::Mismatch, error.to_string()).with_source(error.clone()),
        };
        if self.say_call(seq, mine).is_err() {
            return unknown();
        }
        let first = error.context().peer;
        let mut waiting: Vec<u32> = first
            .into_iter()
            .filter(|p| *p < c.world_size && *p != c.rank)
            .collect();
        waiting.extend(self.peers().filter(|p| Some(*p) != first));
        // A rank that agrees with this one is no help: another one does not.
        while !waiting.is_empty() && !time_left(until).is_zero() && !stop.load(Ordering::Acquire) {
            let mut unanswered = Vec::new();
            for peer in waiting {
                match self.call_of(peer, until) {
                    Some((number, theirs)) if number == seq && theirs != mine => {
                        let text = format!("rank {peer} called {theirs}, rank {} called {mine}", c.rank);
                        return Error::new(ErrorKind::Mismatch, text)
                            .with_peer(peer)
                            .with_seq(seq)
                            .with_source(error.clone());
                    }
                    Some(_) => {}
                    None => unanswered.push(peer),
                }
            }
            waiting = unanswered;
        }
        unknown()
    }

    /// What `peer` said it called, if it does so within a look.
    fn call_of(&self, peer: u32, until: Instant) -> Option<(u64, Fingerprint)> {
        let store = &self.configuration.store;
        let entry = store
            .get(&self.key("call", peer), deadline_in(LOOK).min(until))
            .ok()?;
        let (seq, rest) = entry.split_first_chunk::<8>()?;
        let fingerprint = rest.first_chunk().filter(|_| rest.len() == Fingerprint::BYTES)?;
        Some((u64::from_le_bytes(*seq), Fingerprint::decode(fingerprint)))
    }
}
