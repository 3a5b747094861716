//! Streams of a device: what was enqueued before an operation is seen by it, what comes after it sees its results, and the
//! host waits for neither.

use std::sync::Arc;

use ftcore::{
    Accelerator, Collective, DType, Event, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, Stream,
    SubmitOptions, Tensor, accelerator,
};

use crate::case::{Case, Worlds};
use crate::{Needs, Outcome, Rank};

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let reduce = [
        Needs::Device,
        Needs::Op(OpKind::AllReduce),
        Needs::Reduce(ReduceOp::Sum),
    ];
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3, 4]) {
        all.push(Case::new(
            "streams::a_collective_sees_what_its_stream_wrote_before",
            world,
            &reduce,
            fill_then_reduce,
        ));
        all.push(Case::new(
            "streams::submitted_from_other_threads",
            world,
            &reduce,
            other_threads,
        ));
    }
    let ordered = [reduce.as_slice(), &[Needs::WaitOn]].concat();
    for &world in worlds.or(&[2, 3, 4]) {
        all.push(Case::new(
            "streams::l09_wait_on_holds_a_stream_until_the_others_are_there",
            world,
            &ordered,
            wait_on,
        ));
    }
    all
}

struct Side {
    accelerator: Arc<dyn Accelerator>,
    group: Box<dyn ProcessGroup>,
    index: u32,
}

impl Side {
    fn new(rank: &Rank) -> Outcome<Self> {
        let group = rank.bare()?;
        group.configure(rank.configuration("main", 1))?;
        Ok(Self {
            accelerator: accelerator(&rank.device.kind)?,
            group,
            index: rank.device.index,
        })
    }

    fn stream(&self) -> Outcome<Arc<dyn Stream>> {
        Ok(self.accelerator.new_stream(self.index, false)?)
    }

    /// A tensor that is being filled on `stream` when this returns.
    fn filled(&self, value: i32, count: usize, stream: &dyn Stream) -> Outcome<Tensor> {
        let mut tensor = self.accelerator.alloc(self.index, DType::I32, &[count])?;
        let bytes: Vec<u8> = value.to_ne_bytes().repeat(count);
        self.accelerator.copy_in(&bytes, &mut tensor, stream)?;
        Ok(tensor)
    }

    fn submit(&self, tensor: Tensor, stream: &Arc<dyn Stream>, rank: &Rank) -> Outcome<ftcore::Work> {
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(rank.soon())
        };
        Ok(self.group.run(op, options)?)
    }

    fn read(&self, tensor: &Tensor, stream: &dyn Stream) -> Outcome<Vec<i32>> {
        let mut bytes = vec![0u8; tensor.byte_len()];
        self.accelerator.copy_out(tensor, &mut bytes, stream)?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(words.iter().map(|w| i32::from_ne_bytes(*w)).collect())
    }
}

/// Fill, reduce and read in one order of streams, many times over, with a stream of its own for every step's reading.
fn fill_then_reduce(rank: &Rank) -> Outcome {
    let side = Side::new(rank)?;
    let (writer, reader) = (side.stream()?, side.stream()?);
    for round in 0..20i32 {
        let count = 1 + (round as usize * 7919) % 60_000;
        // Old contents that a missing order would show.
        let mut tensor = side.filled(-1_000_000, count, &*writer)?;
        let value = round * 100 + rank.rank as i32;
        let bytes: Vec<u8> = value.to_ne_bytes().repeat(count);
        side.accelerator.copy_in(&bytes, &mut tensor, &*writer)?;
        let work = side.submit(tensor, &writer, rank)?;
        work.wait_on(&*reader)?;
        let result = side.read(&work.take_tensor()?, &*reader)?;
        let world = rank.world as i32;
        let want = round * 100 * world + world * (world - 1) / 2;
        ensure!(
            result.len() == count && result.iter().all(|&x| x == want),
            "round {round}: the sum of {count} elements is {:?}, expected {want}",
            result.iter().find(|&&x| x != want)
        );
    }
    Ok(side.group.shutdown(rank.soon())?)
}

/// A group does not depend on which device is current on the calling thread.
fn other_threads(rank: &Rank) -> Outcome {
    let side = Side::new(rank)?;
    for round in 0..5i32 {
        std::thread::scope(|scope| {
            let one = scope.spawn(|| -> Outcome {
                let stream = side.stream()?;
                let tensor = side.filled(round, 3000, &*stream)?;
                let work = side.submit(tensor, &stream, rank)?;
                let result = side.read(&work.take_tensor()?, &*stream)?;
                let want = round * rank.world as i32;
                ensure!(
                    result.iter().all(|&x| x == want),
                    "the sum is {:?}, expected {want}",
                    result.first()
                );
                Ok(())
            });
            one.join()
                .unwrap_or_else(|_| Err(crate::Failure::new("a thread panicked")))
        })?;
    }
    Ok(side.group.shutdown(rank.soon())?)
}

/// The last rank comes late. Until it is there, a stream that was told to wait has not passed the operation, and no call
/// of the others has blocked; afterwards the stream goes on by itself.
fn wait_on(rank: &Rank) -> Outcome {
    let side = Side::new(rank)?;
    let (writer, reader) = (side.stream()?, side.stream()?);
    let late = rank.rank == rank.world - 1;
    if late {
        rank.meet("the others wait")?;
    }
    let tensor = side.filled(1, 5000, &*writer)?;
    let work = side.submit(tensor, &writer, rank)?;
    work.wait_on(&*reader)?;
    let passed: Arc<dyn Event> = reader.record()?;
    if !late {
        // A moment in which a stream without order would have passed.
        for _ in 0..20 {
            ensure!(
                !passed.query()?,
                "the stream passed an operation that not every rank has entered"
            );
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        rank.meet("the others wait")?;
    }
    passed.synchronize(rank.soon())?;
    let result = side.read(&work.take_tensor()?, &*reader)?;
    ensure!(
        result.iter().all(|&x| x == rank.world as i32),
        "the sum is {:?}",
        result.first()
    );
    Ok(side.group.shutdown(rank.soon())?)
}
