//! Who contributed to a reduction, written down beside it by ranks that share a host.
//!
//! A rank writes its word into a file in memory that all ranks have open, then makes oneCCL's call. The result of an all-reduce or
//! a reduce-scatter needs the data of every rank, so when the call returns all words of this operation are there: they are
//! read without waiting, and no second call and no copy is needed to count (INV-4: a word carries the number of its operation, and
//! one of another operation is an error). A rank writes its word of operation n + 2 over that of n after n + 1 has
//! ended, which the others began after they had read n: two places per rank are enough.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use ftcore::lifecycle::nonce;
use ftcore::{Configuration, Error, ErrorKind, Result, Store};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};

/// What is before the words: the number that tells this file from any other.
const HEAD: u64 = 8;
/// A rank's two words.
const PLACE: usize = 16;

/// The file, and which operation is next.
#[derive(Debug)]
pub(crate) struct Tally {
    file: File,
    rank: u32,
    world: u32,
    next: Mutex<u64>,
}

/// An operation whose word is written.
#[derive(Debug)]
pub(crate) struct Ticket(u64);

/// Where rank 0's file is.
#[derive(Debug, PartialEq, Eq)]
struct Card {
    host: String,
    process: u32,
    descriptor: i32,
    nonce: u64,
}

impl Card {
    fn encode(&self) -> String {
        let Self {
            host,
            process,
            descriptor,
            nonce,
        } = self;
        format!("{host} {process} {descriptor} {nonce:016x}")
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes.get(..bytes.len().min(256))?).ok()?;
        let mut parts = text.split(' ');
        let card = Self {
            host: parts.next()?.to_string(),
            process: parts.next()?.parse().ok()?,
            descriptor: parts.next()?.parse().ok()?,
            nonce: u64::from_str_radix(parts.next()?, 16).ok()?,
        };
        parts.next().is_none().then_some(card)
    }
}

/// The same for processes that see each other in `/proc`; `None` where that cannot be known.
fn host() -> Option<String> {
    ftcore::process_space().filter(|space| !space.contains(' '))
}

fn make(nonce: u64, world: u32) -> Option<File> {
    let file = File::from(memfd_create("oxccl-xccl", MemfdFlags::CLOEXEC).ok()?);
    file.set_len(HEAD + u64::from(world) * PLACE as u64).ok()?;
    file.write_all_at(&nonce.to_ne_bytes(), 0).ok()?;
    Some(file)
}

/// Rank 0's file; `None` for anything else.
fn open(card: &Card, world: u32) -> Option<File> {
    if host()? != card.host {
        return None;
    }
    let path = format!("/proc/{}/fd/{}", card.process, card.descriptor);
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty()).ok()?);
    let mut found = [0; 8];
    file.read_exact_at(&mut found, 0).ok()?;
    let whole = file.metadata().ok()?.len() == HEAD + u64::from(world) * PLACE as u64;
    (whole && u64::from_ne_bytes(found) == card.nonce).then_some(file)
}

impl Tally {
    /// A file that all ranks have open; `None` unless all can. A call of all ranks.
    pub(crate) fn agree(configuration: &Configuration, store: &dyn Store) -> Result<Option<Self>> {
        let Configuration {
            rank,
            world_size: world,
            deadline,
            ..
        } = *configuration;
        let card_key = "tally";
        let file = if rank == 0 {
            let nonce = nonce();
            let made = host().and_then(|host| Some((host, make(nonce, world)?)));
            let text = match &made {
                Some((host, file)) => Card {
                    host: host.clone(),
                    process: std::process::id(),
                    descriptor: file.as_raw_fd(),
                    nonce,
                }
                .encode(),
                None => "none".into(),
            };
            store.set(card_key, text.as_bytes(), deadline)?;
            made.map(|(_, file)| file)
        } else {
            let card = store.get(card_key, deadline)?;
            Card::decode(&card).and_then(|card| open(&card, world))
        };
        let key = |rank: u32| format!("tally/{rank}");
        let word: &[u8] = if file.is_some() { b"yes" } else { b"no" };
        store.set(&key(rank), word, deadline)?;
        let keys: Vec<String> = (0..world).map(key).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        // Rank 0 keeps its descriptor open at least until all have answered.
        let words = store.multi_get(&keys, deadline)?;
        let all = words.iter().all(|word| word == b"yes");
        tracing::debug!(rank, all, "contributors are counted beside the data");
        Ok(file.filter(|_| all).map(|file| Self {
            file,
            rank,
            world,
            next: Mutex::new(1),
        }))
    }

    fn at(rank: u32, number: u64) -> u64 {
        HEAD + u64::from(rank) * PLACE as u64 + number % 2 * 8
    }

    /// Writes down whether this rank contributes to the operation that it begins next.
    pub(crate) fn post(&self, contribute: bool) -> Result<Ticket> {
        let number = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let number = *next;
            *next += 1;
            number
        };
        let word = number << 1 | u64::from(contribute);
        self.file
            .write_all_at(&word.to_ne_bytes(), Self::at(self.rank, number))
            .map_err(|e| Error::io("write down who contributes", e))?;
        Ok(Ticket(number))
    }

    /// How many ranks contributed, once the operation of `ticket` has given this rank something of every rank's.
    pub(crate) fn count(&self, ticket: &Ticket) -> Result<u32> {
        let mut words = vec![0; self.world as usize * PLACE];
        self.file
            .read_exact_at(&mut words, HEAD)
            .map_err(|e| Error::io("read who contributed", e))?;
        let second = ticket.0 % 2 == 1;
        let mut contributors = 0;
        for (rank, place) in (0u32..).zip(words.as_chunks::<8>().0.as_chunks::<2>().0) {
            let [even, odd] = place;
            let word = u64::from_ne_bytes(if second { *odd } else { *even });
            if word >> 1 != ticket.0 {
                let text = format!(
                    "it wrote down that it contributes to its reduction {}, but this is number {}",
                    word >> 1,
                    ticket.0
                );
                return Err(Error::new(ErrorKind::Mismatch, text).with_peer(rank));
            }
            contributors += u32::from(word & 1 == 1);
        }
        Ok(contributors)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use ftcore::{Cancel, Epoch, InMemoryStore, deadline_in};

    use super::*;

    fn configuration(store: &Arc<dyn Store>, rank: u32, world: u32) -> Configuration {
        Configuration {
            store: store.clone(),
            prefix: "p".into(),
            name: "n".into(),
            epoch: Epoch(1),
            rank,
            world_size: world,
            deadline: deadline_in(Duration::from_secs(20)),
            cancel: Default::default(),
        }
    }

    fn agree(world: u32, meddle: impl Fn(&dyn Store, u32) + Sync) -> Vec<Option<Tally>> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let one = |rank| {
            meddle(&*store, rank);
            Tally::agree(&configuration(&store, rank, world), &*store).unwrap()
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || one(rank))).collect();
            ranks.into_iter().map(|r| r.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_counts_who_wrote_for_this_very_operation() {
        let ranks: Vec<Tally> = agree(3, |_, _| {}).into_iter().map(Option::unwrap).collect();
        for contributing in [
            [true, true, true],
            [false, true, false],
            [false; 3],
            [true, false, true],
        ] {
            let tickets: Vec<Ticket> = ranks
                .iter()
                .zip(contributing)
                .map(|(t, c)| t.post(c).unwrap())
                .collect();
            let want = contributing.iter().filter(|c| **c).count() as u32;
            // A quick rank is one operation ahead: what the others read must not change under them.
            let ahead = ranks[0].count(&tickets[0]).unwrap();
            assert_eq!(ahead, want);
            let next = ranks[0].post(false).unwrap();
            for (t, ticket) in ranks.iter().zip(&tickets).skip(1) {
                assert_eq!(t.count(ticket).unwrap(), want);
            }
            for t in &ranks[1..] {
                t.post(true).unwrap();
            }
            assert_eq!(ranks[0].count(&next).unwrap(), 2);
        }
    }

    #[test]
    fn a_rank_that_waits_for_the_file_or_the_words_of_others_hears_why_not_to() {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let gone = || Some(Error::new(ErrorKind::PeerLost, "a rank has gone"));
        let heeding = Cancel::watching(gone).over(&store);
        // Rank 1 waits for the card of rank 0, which waits for rank 1's word.
        for rank in [1, 0] {
            let e = Tally::agree(&configuration(&store, rank, 2), &*heeding).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
        }
    }

    #[test]
    fn inv4_a_word_of_another_operation_is_not_counted() {
        let ranks: Vec<Tally> = agree(2, |_, _| {}).into_iter().map(Option::unwrap).collect();
        let ticket = ranks[0].post(true).unwrap();
        let e = ranks[0].count(&ticket).unwrap_err();
        assert_eq!((e.kind(), e.context().peer), (ErrorKind::Mismatch, Some(1)));
    }

    #[test]
    fn inv10_a_card_that_leads_elsewhere_leaves_all_ranks_without_a_file() {
        // Rank 1 reads a card that names a descriptor of this process, but not the file.
        let other = File::open("/proc/self/status").unwrap();
        let wrong = Card {
            host: host().unwrap(),
            process: std::process::id(),
            descriptor: other.as_raw_fd(),
            nonce: 7,
        };
        assert!(open(&wrong, 2).is_none());
        let file = make(7, 2).unwrap();
        let right = Card {
            descriptor: file.as_raw_fd(),
            ..wrong
        };
        assert!(open(&right, 2).is_some() && open(&right, 3).is_none());
        assert!(open(&Card { nonce: 8, ..right }, 2).is_none());
        for text in [
            &b""[..],
            b"none",
            b"h 1 2",
            b"h 1 2 zz",
            b"h 1 2 3 4",
            b"\xff",
            &[b' '; 999],
        ] {
            assert_eq!(Card::decode(text), None);
        }
        let far = agree(2, |store, rank| {
            if rank == 1 {
                let soon = deadline_in(Duration::from_secs(20));
                store.wait(&["tally"], soon).unwrap();
                store
                    .set("tally", b"elsewhere 1 3 0000000000000007", soon)
                    .unwrap();
            }
        });
        assert!(
            far.iter().all(Option::is_none),
            "one rank without it, none with it"
        );
    }
}
