//! What ranks tell each other beside oneCCL, through the store: failures, a barrier that names who is missing, and leaves.
//!
//! oneCCL does not report the loss of a peer: a rank whose peer is gone waits for ever. So the first rank that fails writes why, and all
//! others, who look for it a few times a second, fail with the same cause at once instead of at their deadlines (L27).

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::agreement::Agreement;
use ftcore::engine::Place;
use ftcore::{Error, ErrorKind, Result, Store, deadline_in};

/// How long one look for a notice lasts: what a rank's own failure may take until it is told from another thread.
const LOOK: Duration = Duration::from_millis(200);
/// What a group's end waits for a store that does not answer.
const TELLING: Duration = Duration::from_millis(500);
/// It is told for this much longer beside: a rank that does not hear of a failure waits until its own deadline.
const TELLING_ON: Duration = Duration::from_secs(10);
/// Beyond the deadline of a monitored barrier, for rank 0's verdict.
const GRACE: Duration = Duration::from_secs(2);
/// Longer texts are cut: they come from another process.
const LONGEST: usize = 4096;

/// The store of one configuration.
#[derive(Clone)]
pub(crate) struct Channel {
    store: Arc<dyn Store>,
    prefix: String,
    rank: u32,
    world: u32,
}

impl Channel {
    /// `prefix` is unique per configuration and epoch.
    pub(crate) fn new(store: Arc<dyn Store>, prefix: String, rank: u32, world: u32) -> Self {
        Self {
            store,
            prefix,
            rank,
            world,
        }
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// What the ranks compare before they call the library.
    pub(crate) fn agreement(&self, place: Place) -> Agreement {
        Agreement::new(self.store.clone(), self.prefix.clone(), place)
    }

    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// Tells the others why this rank failed, unless another rank told already. Calls `told` after that, or when the store has not answered for
    /// a moment; then the store is asked on.
    pub(crate) fn tell(&self, error: &Error, told: impl FnOnce()) {
        let text: String = error.to_string().chars().take(LONGEST / 4).collect();
        let value = format!("{}\n{}\n{text}", kind_name(error.kind()), self.rank);
        let tell = |limit| {
            self.store
                .compare_set(&self.key("notices"), b"", value.as_bytes(), deadline_in(limit))
        };
        let first = tell(TELLING);
        told();
        if let Err(error) = first.or_else(|_| tell(TELLING_ON)) {
            tracing::warn!(rank = self.rank, %error, "the other ranks could not be told of a failure");
        }
    }

    /// Waits a moment for a notice.
    pub(crate) fn notice(&self) -> Option<Error> {
        let until = deadline_in(LOOK);
        let key = self.key("notices");
        match self.store.wait(&[&key], until) {
            Ok(()) => {
                let value = self.store.get(&key, deadline_in(TELLING)).ok()?;
                Some(read_notices(&value))
            }
            Err(e) => {
                if e.kind() != ErrorKind::Timeout {
                    // A store that is away answers at once: do not ask it without pause.
                    std::thread::sleep(ftcore::time_left(until));
                }
                None
            }
        }
    }

    /// Every rank enters; rank 0 finds out who does not until `deadline`, and tells every rank.
    pub(crate) fn monitored_barrier(&self, seq: u64, wait_all: bool, deadline: Instant) -> Result<()> {
        let entered = |rank: u32| self.key(&format!("monitored/{seq}/{rank}"));
        let verdict = self.key(&format!("monitored/{seq}/verdict"));
        if self.rank != 0 {
            self.store.set(&entered(self.rank), b"1", deadline)?;
            let late = deadline.checked_add(GRACE).unwrap_or(deadline);
            let answer = self.store.get(&verdict, late).map_err(|e| match e.kind() {
                ErrorKind::Timeout => Error::timeout("rank 0 has not entered the barrier").with_peer(0),
                _ => e,
            })?;
            return match answer.as_slice() {
                b"ok" => Ok(()),
                text => Err(Error::timeout(clean(text))),
            };
        }
        let mut missing = Vec::new();
        for rank in 1..self.world {
            match self.store.wait(&[&entered(rank)], deadline) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::Timeout => {
                    let here = self
                        .store
                        .check(&[&entered(rank)], deadline_in(TELLING))
                        .unwrap_or(false);
                    if !here {
                        missing.push(rank);
                        if !wait_all {
                            break;
                        }
                    }
                }
                Err(e) => return Err(e),
            }
        }
        let text = if missing.is_empty() {
            None
        } else {
            Some(format!(
                "{} of {} did not enter the monitored barrier by its deadline",
                ranks(&missing),
                self.world
            ))
        };
        let answer = text.as_deref().unwrap_or("ok");
        self.store
            .set(&verdict, answer.as_bytes(), deadline_in(TELLING))?;
        match text {
            None => Ok(()),
            Some(text) => Err(Error::timeout(text)),
        }
    }

    /// Says that this rank leaves, and waits until all have.
    pub(crate) fn all_have_left(&self, deadline: Instant) -> Result<()> {
        self.all("left", deadline)
    }

    /// Says that this rank has destroyed its communicators, and waits until all have.
    pub(crate) fn all_have_destroyed(&self, deadline: Instant) -> Result<()> {
        self.all("destroyed", deadline)
    }

    fn all(&self, what: &str, deadline: Instant) -> Result<()> {
        let key = |rank: u32| self.key(&format!("{what}/{rank}"));
        self.store.set(&key(self.rank), b"1", deadline)?;
        let keys: Vec<String> = (0..self.world).map(key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.store.wait(&keys, deadline)
    }
}

/// "rank 2" or "ranks 2, 3".
pub(crate) fn ranks(list: &[u32]) -> String {
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    match list {
        [_] => format!("rank {}", names.join(", ")),
        _ => format!("ranks {}", names.join(", ")),
    }
}

/// Text from another process, cut and without control characters.
pub(crate) fn clean(bytes: &[u8]) -> String {
    let bytes = bytes.get(..bytes.len().min(LONGEST)).unwrap_or(bytes);
    String::from_utf8_lossy(bytes)
        .chars()
        .filter(|c| !c.is_control())
        .collect()
}

fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Timeout => "timeout",
        ErrorKind::Aborted => "aborted",
        ErrorKind::Backend => "backend",
        ErrorKind::Mismatch => "mismatch",
        _ => "peer",
    }
}

/// Any bytes give an error that makes sense.
fn read_notices(value: &[u8]) -> Error {
    let mut parts = value.splitn(3, |b| *b == b'\n');
    let kind = match parts.next() {
        Some(b"timeout") => ErrorKind::Timeout,
        Some(b"aborted") => ErrorKind::Aborted,
        Some(b"backend") => ErrorKind::Backend,
        Some(b"mismatch") => ErrorKind::Mismatch,
        _ => ErrorKind::PeerLost,
    };
    let rank = parts
        .next()
        .and_then(|r| std::str::from_utf8(r).ok())
        .and_then(|r| r.parse::<u32>().ok());
    let text = clean(parts.next().unwrap_or(b"it failed without saying why"));
    match rank {
        Some(rank) => Error::new(kind, format!("rank {rank} reports: {text}")).with_peer(rank),
        None => Error::new(kind, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ftcore::InMemoryStore;

    fn channels(world: u32) -> Vec<Channel> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        (0..world)
            .map(|rank| Channel::new(store.clone(), "x".into(), rank, world))
            .collect()
    }

    #[test]
    fn the_first_failure_is_heard_by_all_with_kind_and_origin() {
        let all = channels(3);
        assert!(all[0].notice().is_none());
        all[2].tell(&Error::timeout("no peer came"), || ());
        all[1].tell(&Error::new(ErrorKind::Aborted, "later"), || ());
        for channel in &all {
            let e = channel.notice().unwrap();
            assert_eq!((e.kind(), e.context().peer), (ErrorKind::Timeout, Some(2)));
            assert!(e.to_string().contains("no peer came"), "{e}");
        }
    }

    #[test]
    fn damaged_notices_are_an_error_that_makes_sense() {
        for bytes in [
            &b""[..],
            b"\n\n\n",
            b"timeout",
            b"\xff\xfe\nx\n\x07",
            &[b'a'; 100_000],
        ] {
            let e = read_notices(bytes);
            assert!(e.to_string().len() < 2 * LONGEST);
        }
    }

    #[test]
    fn a_monitored_barrier_names_everybody_who_is_missing() {
        let all = channels(4);
        let soon = || deadline_in(Duration::from_secs(20));
        std::thread::scope(|scope| {
            let one = scope.spawn(|| all[1].monitored_barrier(7, true, soon()));
            // Rank 0 does not wait long, but rank 1 is there.
            let entered = all[0].key("monitored/7/1");
            all[0].store().wait(&[&entered], soon()).unwrap();
            let zero = all[0].monitored_barrier(7, true, deadline_in(Duration::from_millis(200)));
            for e in [zero.unwrap_err(), one.join().unwrap().unwrap_err()] {
                assert!(e.to_string().contains("ranks 2, 3 of 4"), "{e}");
            }
        });
    }
}
