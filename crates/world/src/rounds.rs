//! Where the store outlives the job's processes, such as that of torchrun's agent: how the ranks tell those that live from those of an earlier
//! attempt.
//!
//! The launcher's own count of attempts does not serve: each node has one, and they differ. So every process takes the next number of its rank
//! (`came`), and the newest one of a rank counts. The number of rank 0 is the round. All ranks answer in the newest round (`here`) and wait for
//! what is said of it; a process that is dead answers in none. Once all ranks have answered, rank 0 says that the round begins, and with which
//! processes; what the ranks leave in the store after that lies under the round. A later rank 0 says first that the round before its own is over,
//! whose ranks then answer in the new one.
//!
//! A process that is not the newest of its rank is about to be killed, or was started by mistake: it takes part in no round that begins, and hears why.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, PrefixStore, Result, Store, deadline_in, time_left};

/// So long a wait for one key lasts: what would have set it may have died just before.
const TURN: Duration = Duration::from_secs(1);
/// What is said of a round to which rank 0 does not come any more.
const OVER: &[u8] = b"over";
const PREFIX: &str = "oxccl";

/// One process among those that meet.
struct Comer<'a> {
    store: PrefixStore,
    rank: u32,
    world_size: u32,
    /// Among the processes of its rank, from 1 on.
    number: i64,
    deadline: Instant,
    address: &'a str,
}

/// The prefix in `store`, which is at `address`, that is of the living ranks alone.
///
/// Errors: `Timeout` if they are not all there by `deadline`; `Conflict` if a later process says that it is this rank; what the store says.
pub(crate) fn meet(
    store: &Arc<dyn Store>,
    (rank, world_size): (u32, u32),
    address: &str,
    deadline: Instant,
) -> Result<String> {
    let keys = PrefixStore::new(store.clone(), PREFIX);
    let me = Comer {
        number: keys.add(&came(rank), 1, deadline)?,
        store: keys,
        rank,
        world_size,
        deadline,
        address,
    };
    let round = me.meet()?;
    Ok(format!("{PREFIX}/{}", name(round)))
}

fn came(rank: u32) -> String {
    format!("came/{rank}")
}

fn name(round: i64) -> String {
    format!("round-{round}")
}

fn here(round: i64, rank: u32) -> String {
    format!("{}/here/{rank}", name(round))
}

fn said(round: i64) -> String {
    format!("{}/said", name(round))
}

impl Comer<'_> {
    /// The round that begins with this process.
    fn meet(&self) -> Result<i64> {
        if self.rank == 0 {
            self.store
                .compare_set(&said(self.number - 1), b"", OVER, self.deadline)?;
        }
        loop {
            let [round, newest] = self.numbers(&[0, self.rank])?[..] else {
                return Err(Error::new(ErrorKind::Internal, "a store that left out a value"));
            };
            if newest != self.number {
                return Err(self.replaced(newest));
            }
            self.store.set(&here(round, self.rank), b"", self.deadline)?;
            if self.rank == 0 && !self.begin(round)? {
                continue;
            }
            let Some(text) = self.in_turn(round, |until| self.store.get(&said(round), until))? else {
                continue;
            };
            if text == OVER {
                continue;
            }
            if self.is_in(&text) {
                return Ok(round);
            }
            // It began without this process, which is of a later attempt than rank 0: until the next rank 0 comes.
            let next = here(round + 1, 0);
            self.in_turn(round, |until| self.store.wait(&[&next], until))?;
        }
    }

    /// Of rank 0: says that the round begins, if all ranks have answered within a turn.
    fn begin(&self, round: i64) -> Result<bool> {
        let ranks: Vec<u32> = (0..self.world_size).collect();
        let all: Vec<String> = ranks.iter().map(|rank| here(round, *rank)).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        if self
            .in_turn(round, |until| self.store.wait(&all, until))?
            .is_none()
        {
            return Ok(false);
        }
        // The newest of each rank, whichever answered: it finds itself here, or answers in a later round.
        let numbers = self.numbers(&ranks)?;
        let text: Vec<String> = numbers.iter().map(ToString::to_string).collect();
        let text = text.join(" ");
        self.store
            .compare_set(&said(round), b"", text.as_bytes(), self.deadline)
            .map(|_| true)
    }

    /// The numbers of the newest processes of these ranks, each of which has come, or does so by the deadline.
    fn numbers(&self, ranks: &[u32]) -> Result<Vec<i64>> {
        let keys: Vec<String> = ranks.iter().map(|rank| came(*rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let values = self.store.multi_get(&keys, self.deadline)?;
        values.iter().map(|value| self.number_in(value)).collect()
    }

    fn number_in(&self, value: &[u8]) -> Result<i64> {
        let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        number.ok_or_else(|| {
            let text = format!(
                "the store at {} has '{}' where the number of a process should be",
                self.address,
                String::from_utf8_lossy(value)
            );
            Error::new(ErrorKind::Protocol, text)
        })
    }

    /// Whether a round that begins with these processes has this one in it. Another attempt may have had other ranks.
    fn is_in(&self, text: &[u8]) -> bool {
        let text = String::from_utf8_lossy(text);
        let mut numbers = text.split(' ');
        let mine = self.number.to_string();
        numbers.clone().count() == self.world_size as usize
            && numbers.nth(self.rank as usize) == Some(mine.as_str())
    }

    /// What `wait` gives within a turn; `None` if that is nothing. `Timeout` at the deadline.
    fn in_turn<T>(&self, round: i64, wait: impl FnOnce(Instant) -> Result<T>) -> Result<Option<T>> {
        match wait(self.deadline.min(deadline_in(TURN))) {
            Ok(value) => Ok(Some(value)),
            Err(e) if e.kind() != ErrorKind::Timeout => Err(e),
            Err(_) if !time_left(self.deadline).is_zero() => Ok(None),
            Err(e) => {
                let whom = match self.rank {
                    0 => "the ranks of these keys have not come",
                    _ => "rank 0 has not said that all ranks are there",
                };
                let text = format!("round {round} at {}: {whom}: {}", self.address, e.message());
                Err(Error::timeout(text).with_source(e))
            }
        }
    }

    fn replaced(&self, newest: i64) -> Error {
        Error::new(
            ErrorKind::Conflict,
            format!(
                "rank {} is claimed twice at {}: process {newest} of this rank has come there, and this is its process {}; if the launcher has not started this rank again, give each process a rank of its own",
                self.rank, self.address, self.number
            ),
        )
    }
}
