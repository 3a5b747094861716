//! Whether all ranks call the same collective: asked through the store before any of them is in oneCCL, which hangs or moves wrong bytes
//! where they do not (L15).
//!
//! Costs two round trips to the store per collective, so it is an option (`mismatch_detection`). No rank begins before all have come: a rank that
//! waits for another one is not in a call of oneCCL, and can be ended.

use std::time::Instant;

use ftcore::engine::Place;
use ftcore::{Collective, Error, ErrorKind, Fingerprint, Result, Tensor, deadline_in};

use crate::notices::{Channel, TELLING};

/// What a rank calls, as far as it concerns the others.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
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
    pub(crate) fn of(op: &Collective, place: Place) -> Self {
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

fn key(channel: &Channel, number: u64, rank: u32) -> String {
    channel.key(&format!("call/{number}/{rank}"))
}

/// Says what this rank calls as its collective `number`.
pub(crate) fn post(channel: &Channel, record: &Record, number: u64, deadline: Instant) -> Result<()> {
    let key = key(channel, number, channel.rank());
    channel.store().set(&key, &record.encode(), deadline)
}

/// Waits until every rank has come to collective `number`; `Mismatch` on all of them if they call different things. `over` is asked a few times a
/// second whether there is no point any more.
pub(crate) fn compare(
    channel: &Channel,
    record: &Record,
    number: u64,
    deadline: Instant,
    over: impl Fn() -> bool,
) -> Result<()> {
    let (own, world) = (channel.rank(), channel.world());
    let keys: Vec<String> = (0..world).map(|rank| key(channel, number, rank)).collect();
    let theirs = channel.await_keys(&keys, deadline, over)?;
    let mut all = Vec::with_capacity(theirs.len());
    for (rank, bytes) in (0u32..).zip(theirs) {
        let record = Record::decode(&bytes, world);
        let text = "what it says of its call is no record of this backend";
        all.push(record.ok_or_else(|| Error::new(ErrorKind::Protocol, text).with_peer(rank))?);
    }
    // All have come to this one, so all have read what was said of the last.
    if let Some(last) = number.checked_sub(1) {
        let _ = channel
            .store()
            .delete(&key(channel, last, own), deadline_in(TELLING));
    }
    check(own, record, &all)
}

fn check(own: u32, record: &Record, all: &[Record]) -> Result<()> {
    let mismatch = |text, peer| Err(Error::new(ErrorKind::Mismatch, text).with_peer(peer));
    let (mine, ranks) = (record.fingerprint, || (0u32..).zip(all));
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
    use std::sync::Arc;
    use std::time::Duration;

    use ftcore::{DType, InMemoryStore, ReduceOp, Store};
    use proptest::prelude::*;

    use super::*;

    fn place(rank: u32, world: u32) -> Place {
        Place {
            rank,
            world,
            epoch: 1,
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
            let channel = Channel::new(store.clone(), "x".into(), rank, world);
            let by = deadline_in(Duration::from_secs(20));
            let agree = |(number, op): (u64, &Collective)| {
                let record = Record::of(op, place(rank, world));
                post(&channel, &record, number, by)?;
                compare(&channel, &record, number, by, || false)
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
        let channel = Channel::new(store, "x".into(), 0, 2);
        let record = Record::of(&Collective::Barrier, place(0, 2));
        let soon = deadline_in(Duration::from_millis(50));
        post(&channel, &record, 0, soon).unwrap();
        let late = deadline_in(Duration::from_secs(60));
        for (until, is_over) in [(soon, false), (late, true)] {
            let e = compare(&channel, &record, 0, until, || is_over).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Timeout);
        }
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
