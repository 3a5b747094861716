//! Whether all ranks call the same thing: asked through the store before any of them calls a library that hangs or moves wrong bytes where
//! they do not (L15). For backends whose frames do not say it.
//!
//! No rank begins before all have come, so one that waits for another is not in the library yet, and can be ended. A collective costs two round
//! trips to the store, and so does a message.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::engine::Place;
use crate::printable::one_line;
use crate::{
    Cancel, Collective, Error, ErrorKind, Fingerprint, GroupOptions, Result, Store, Tensor, deadline_in,
};

/// A key that the store does not delete by then stays.
const DELETING: Duration = Duration::from_millis(500);
/// Longer texts are cut: they come from another process.
const LONGEST: usize = 200;

/// The option that backends name which have this: `on`, or `off`, the default. All ranks must say the same.
pub const OPTION: &str = "hint:mismatch_detection";

/// Whether `options` ask for it. `InvalidArgument` if they say neither yes nor no.
pub fn is_asked_for(options: &GroupOptions) -> Result<bool> {
    match options.hints.get("mismatch_detection").map(String::as_str) {
        None | Some("off") => Ok(false),
        Some("on") => Ok(true),
        Some(other) => Err(Error::invalid(format!(
            "option mismatch_detection is '{other}'; it can be on or off"
        ))),
    }
}

/// What a rank calls, as far as it concerns the others.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    fingerprint: Fingerprint,
    /// How many bytes it has for each rank, and expects of each; empty where the fingerprint says that.
    sends: Vec<u64>,
    expects: Vec<u64>,
}

fn lengths(tensors: &[Tensor]) -> Vec<u64> {
    tensors.iter().map(|tensor| tensor.byte_len() as u64).collect()
}

/// The lengths of the parts of `tensor`: those of `splits`, or equal ones.
fn split(tensor: &Tensor, splits: &[usize], world: usize) -> Vec<u64> {
    match splits {
        [] => vec![(tensor.byte_len() / world.max(1)) as u64; world],
        splits => {
            let size = tensor.dtype().size();
            splits.iter().map(|count| (count * size) as u64).collect()
        }
    }
}

/// `bytes` for rank `root`, none for others.
fn only(root: u32, bytes: &Tensor, world: usize) -> Vec<u64> {
    let all = 0..world as u64;
    all.map(|rank| (rank == u64::from(root)) as u64 * bytes.byte_len() as u64)
        .collect()
}

impl Record {
    /// Of `op` on the rank at `place`.
    pub fn of(op: &Collective, place: Place) -> Self {
        let world = place.world as usize;
        let or_nothing = |lengths: Vec<u64>| match lengths.is_empty() {
            true => vec![0; world],
            false => lengths,
        };
        let (sends, expects) = match op {
            Collective::AllGather { input, outputs } => {
                (vec![input.byte_len() as u64; world], lengths(outputs))
            }
            Collective::Gather { input, outputs, root } => {
                (only(*root, input, world), or_nothing(lengths(outputs)))
            }
            Collective::Scatter { inputs, output, root } => {
                (or_nothing(lengths(inputs)), only(*root, output, world))
            }
            Collective::AllToAll { inputs, outputs } => (lengths(inputs), lengths(outputs)),
            Collective::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            } => (
                split(input, input_splits, world),
                split(output, output_splits, world),
            ),
            _ => (Vec::new(), Vec::new()),
        };
        Self {
            fingerprint: op.fingerprint(),
            sends,
            expects,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.fingerprint.encode().to_vec();
        for length in self.sends.iter().chain(&self.expects) {
            bytes.extend(length.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8], world: u32) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<{ Fingerprint::BYTES }>()?;
        let (lengths, []) = rest.as_chunks::<8>() else {
            return None;
        };
        let lengths: Vec<u64> = lengths.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        let (sends, expects) = match lengths.len() {
            0 => (Vec::new(), Vec::new()),
            n if n == world as usize * 2 => {
                let (sends, expects) = lengths.split_at(world as usize);
                (sends.to_vec(), expects.to_vec())
            }
            _ => return None,
        };
        Some(Self {
            fingerprint: Fingerprint::decode(head),
            sends,
            expects,
        })
    }
}

/// The place of a message: the `number`th from one rank to another.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// The sender's rank.
    pub from: u32,
    /// The receiver's.
    pub to: u32,
    /// How many there were before it between the two.
    pub number: u64,
}

impl Message {
    fn key(self, what: &str) -> String {
        let Self { from, to, number } = self;
        format!("message/{from}-{to}/{number}/{what}")
    }
}

/// What the ranks of one configuration compare.
#[derive(Clone)]
pub struct Agreement {
    /// Under `over`.
    store: Arc<dyn Store>,
    over: Cancel,
    prefix: String,
    place: Place,
}

impl Agreement {
    /// `prefix` stands before every key; it is unique per configuration and epoch.
    pub fn new(store: Arc<dyn Store>, prefix: String, place: Place) -> Self {
        let over = Cancel::default();
        Self {
            store: over.over(&store),
            over,
            prefix,
            place,
        }
    }

    /// There is no point any more: what waits here ends with `reason`, and so does what is asked later. The first reason counts.
    pub fn end(&self, reason: Error) {
        self.over.cancel(reason);
    }

    fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    fn call(&self, number: u64, rank: u32) -> String {
        self.key(&format!("call/{number}/{rank}"))
    }

    fn forget(&self, key: &str) {
        // Left behind it costs the store a few bytes until the epoch is forgotten.
        let _ = self.store.delete(key, deadline_in(DELETING));
    }

    /// Says what this rank calls as its collective `number`.
    ///
    /// Errors: the store's; the reason of the [end](Self::end).
    pub fn post(&self, record: &Record, number: u64, deadline: Instant) -> Result<()> {
        let key = self.call(number, self.place.rank);
        self.store.set(&key, &record.encode(), deadline)
    }

    /// Waits until every rank has [posted](Self::post) its collective `number`.
    ///
    /// Errors: `Mismatch` on all ranks if they call different things; `Timeout` at the deadline; `Protocol`; the store's; the reason of the
    /// [end](Self::end).
    pub fn compare(&self, number: u64, deadline: Instant) -> Result<()> {
        let Place { rank: own, world, .. } = self.place;
        let keys: Vec<String> = (0..world).map(|rank| self.call(number, rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let theirs = self.store.multi_get(&keys, deadline)?;
        let mut all = Vec::with_capacity(theirs.len());
        for (rank, bytes) in (0u32..).zip(theirs) {
            let record = Record::decode(&bytes, world);
            let text = "what it says of its call is no record of one";
            all.push(record.ok_or_else(|| Error::new(ErrorKind::Protocol, text).with_peer(rank))?);
        }
        // All have come to this one, so all have read what was said of the last.
        if let Some(last) = number.checked_sub(1) {
            self.forget(&self.call(last, own));
        }
        check(own, &all)
    }

    /// One end of a message meets the other: the sender says what it has (`content`) and waits until that is wanted; the receiver waits for that and
    /// refuses what does not fit.
    ///
    /// Errors: `Mismatch` on both ends if their contents differ; `Timeout` at the deadline; the store's; the reason of the [end](Self::end).
    pub fn meet(&self, message: Message, content: &str, deadline: Instant) -> Result<()> {
        let (offer, answer) = (self.key(&message.key("offer")), self.key(&message.key("answer")));
        // Each end deletes what it alone has read of the message before, while the other one comes to this.
        let forget_last = |what| {
            if let Some(number) = message.number.checked_sub(1) {
                self.forget(&self.key(&Message { number, ..message }.key(what)));
            }
        };
        if message.from == self.place.rank {
            self.store.set(&offer, content.as_bytes(), deadline)?;
            forget_last("answer");
            let answered = self.store.get(&answer, deadline)?;
            return match answered.as_slice() {
                b"go" => Ok(()),
                other => Err(misfit(content, &said(other), message.to)),
            };
        }
        forget_last("offer");
        let offered = self.store.get(&offer, deadline)?;
        let fits = offered == content.as_bytes();
        let verdict = if fits { "go" } else { content };
        self.store.set(&answer, verdict.as_bytes(), deadline)?;
        match fits {
            true => Ok(()),
            false => Err(misfit(&said(&offered), content, message.from)),
        }
    }
}

fn misfit(sent: &str, received: &str, peer: u32) -> Error {
    let text = format!("the sender has {sent}, the receiver expects {received}");
    Error::new(ErrorKind::Mismatch, text).with_peer(peer)
}

/// Text from another process.
fn said(bytes: &[u8]) -> String {
    one_line(&String::from_utf8_lossy(bytes), LONGEST).into_owned()
}

/// What the ranks call, as the rank `own` is told it.
fn check(own: u32, all: &[Record]) -> Result<()> {
    let mismatch = |text, peer| Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer));
    let ranks = || (0u32..).zip(all);
    let Some(mine) = all.get(own as usize).map(|record| record.fingerprint) else {
        return Ok(());
    };
    if let Some((rank, other)) = ranks().find(|(_, other)| other.fingerprint != mine) {
        let text = format!(
            "the ranks called different collectives: rank {rank} called {}, rank {own} {mine}",
            other.fingerprint
        );
        return mismatch(text, rank);
    }
    for (from, sender) in ranks() {
        for ((to, receiver), sent) in ranks().zip(&sender.sends) {
            let expected = receiver.expects.get(from as usize).unwrap_or(&0);
            if sent != expected {
                let text = format!(
                    "rank {from} has {sent} bytes for rank {to}, which expects {expected} bytes of it"
                );
                return mismatch(text, if from == own { to } else { from });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::{DType, Epoch, InMemoryStore, ReduceOp};
    use proptest::prelude::*;

    use super::*;

    fn place(rank: u32, world: u32) -> Place {
        Place {
            rank,
            world,
            epoch: Epoch(1),
        }
    }

    fn f(count: usize) -> Tensor {
        Tensor::zeros(DType::F32, count)
    }

    fn sum(count: usize) -> Collective {
        Collective::AllReduce {
            tensors: vec![f(count)],
            op: ReduceOp::Sum,
        }
    }

    /// What each rank is told of collectives `calls[rank]`, one after the other.
    fn told(calls: Vec<Vec<Collective>>) -> Vec<Vec<Result<()>>> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let world = calls.len() as u32;
        let one = |rank, calls: Vec<Collective>| {
            let agreement = Agreement::new(store.clone(), "x".into(), place(rank, world));
            let by = deadline_in(Duration::from_secs(20));
            let agree = |(number, op): (u64, &Collective)| {
                let record = Record::of(op, place(rank, world));
                agreement.post(&record, number, by)?;
                agreement.compare(number, by)
            };
            (0..).zip(&calls).map(agree).collect()
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..)
                .zip(calls)
                .map(|(rank, calls)| scope.spawn(move || one(rank, calls)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn refused(calls: Vec<Collective>, words: &[&str]) {
        let calls = calls.into_iter().map(|call| vec![sum(1), call]).collect();
        for (rank, told) in told(calls).into_iter().enumerate() {
            assert!(told[0].is_ok());
            let e = told[1].clone().unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Mismatch);
            for word in words {
                assert!(e.to_string().contains(word), "rank {rank}: {word} in {e}");
            }
        }
    }

    #[test]
    fn ranks_that_call_different_collectives_are_told_both() {
        refused(
            vec![sum(4), sum(4), sum(5)],
            &["f32, 4 elements", "f32, 5 elements"],
        );
        refused(
            vec![Collective::Barrier, sum(4)],
            &["barrier()", "all_reduce(f32"],
        );
    }

    #[test]
    fn parts_of_other_lengths_than_their_receiver_expects_are_named_on_all_ranks() {
        let exchange = |sent: [usize; 3], expected: [usize; 3]| Collective::AllToAllInto {
            input: f(sent.iter().sum()),
            output: f(expected.iter().sum()),
            input_splits: sent.to_vec(),
            output_splits: expected.to_vec(),
        };
        let calls = vec![
            exchange([1, 2, 4], [1, 2, 3]),
            exchange([2, 2, 2], [2, 2, 2]),
            exchange([3, 2, 1], [3, 2, 1]),
        ];
        refused(calls, &["rank 0 has 16 bytes for rank 2, which expects 12 bytes"]);
        let gather = |rank: u32, outputs: &[usize]| Collective::Gather {
            input: f(1 + rank as usize),
            outputs: outputs.iter().map(|n| f(*n)).collect(),
            root: 1,
        };
        refused(
            vec![gather(0, &[]), gather(1, &[2, 2])],
            &["rank 0 has 4 bytes for rank 1, which expects 8 bytes"],
        );
        let fits = vec![vec![gather(0, &[])], vec![gather(1, &[1, 2])]];
        assert!(told(fits).into_iter().flatten().all(|told| told.is_ok()));
    }

    #[test]
    fn a_rank_that_does_not_come_is_waited_for_until_the_deadline_or_the_end() {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let agreement = Agreement::new(store, "x".into(), place(0, 2));
        let record = Record::of(&Collective::Barrier, place(0, 2));
        let soon = deadline_in(Duration::from_millis(50));
        agreement.post(&record, 0, soon).unwrap();
        assert_eq!(agreement.compare(0, soon).unwrap_err().kind(), ErrorKind::Timeout);
        let late = deadline_in(Duration::from_secs(60));
        agreement.end(Error::new(ErrorKind::Aborted, "enough"));
        assert_eq!(agreement.compare(0, late).unwrap_err().message(), "enough");
    }

    #[test]
    fn messages_meet_and_those_that_do_not_fit_are_refused_on_both_sides() {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let all = [0, 1].map(|rank| Agreement::new(store.clone(), "x".into(), place(rank, 2)));
        let message = |number| Message {
            from: 0,
            to: 1,
            number,
        };
        let soon = || deadline_in(Duration::from_secs(10));
        let meet = |rank: usize, number, content| all[rank].meet(message(number), content, soon());
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                meet(0, 0, "f32 × 3").unwrap();
                meet(0, 1, "f32 × 3").unwrap_err()
            });
            meet(1, 0, "f32 × 3").unwrap();
            let here = meet(1, 1, "f32 × 4").unwrap_err();
            for e in [here, sender.join().unwrap()] {
                assert_eq!(e.kind(), ErrorKind::Mismatch);
                assert!(
                    e.to_string().contains("f32 × 3") && e.to_string().contains("f32 × 4"),
                    "{e}"
                );
            }
        });
        // Of the last one.
        assert_eq!(store.num_keys(soon()).unwrap(), 2);
        all[0].end(Error::new(ErrorKind::Aborted, "enough"));
        assert_eq!(meet(0, 2, "x").unwrap_err().message(), "enough");
    }

    proptest! {
        #[test]
        fn a_record_round_trips(lengths in proptest::collection::vec(any::<u64>(), 3), count in 0usize..9) {
            let fingerprint = sum(count).fingerprint();
            let record = Record { fingerprint, sends: lengths.clone(), expects: lengths };
            prop_assert_eq!(Record::decode(&record.encode(), 3), Some(record));
        }

        #[test]
        fn any_bytes_are_a_record_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..200), world in 1u32..9) {
            let _ = Record::decode(&bytes, world);
        }
    }
}
