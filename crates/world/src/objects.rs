//! Values of any type that serde can write, over any group: as JSON in tensors of bytes on the group's device.
//!
//! Every call begins with an exchange in which each rank says how many bytes it brings and how many it takes: all know before anything larger
//! is sent whether it fits (INV-10), and a rank that cannot write its value is named on all. Meant for settings and reports, not for
//! parameters. JSON has no NaN and no infinities: a float that is one is read as an error, or as `None` of an `Option`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Accelerator, Collective, DType, Device, Error, ErrorKind, ProcessGroup, ProcessGroupExt, Result, Stream,
    SubmitOptions, Tensor, accelerator, deadline_in,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Said instead of a length: this rank's value cannot be written.
const UNWRITTEN: u64 = u64::MAX;

/// How long a call may take, and how much it may bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectOptions {
    /// For the whole call.
    pub timeout: Duration,
    /// The most bytes of JSON that this rank takes in one call, all values together. The least one of all ranks counts.
    pub limit: usize,
}

impl Default for ObjectOptions {
    /// A minute, 64 MiB.
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            limit: 64 << 20,
        }
    }
}

/// The value of `root` (`Some` there) on every rank.
///
/// Errors, with the rank: `InvalidArgument` on all ranks if a value is missing, cannot be written or is larger than a rank takes; `Corrupt` if
/// what came is no `T`; what the group's collectives say.
pub fn broadcast_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    value: Option<&T>,
    root: u32,
    options: ObjectOptions,
) -> Result<T> {
    let wire = Wire::new(group, "broadcast_object", options)?;
    let written = match value.filter(|_| wire.is(root)) {
        Some(value) => write(value),
        None if wire.is(root) => Err(Error::invalid("the root has no value to broadcast")),
        None => Ok(Vec::new()),
    };
    let (mut bytes, lengths) = wire.agree(written)?;
    bytes.resize(wire.of(&lengths, root)?, 0);
    let tensors = vec![wire.tensor(&bytes)?];
    let done = wire.run(Collective::Broadcast { tensors, root })?;
    wire.read(done.last(), root)
}

/// Every rank's value, in the order of ranks.
///
/// Errors: as [`broadcast_object`].
pub fn all_gather_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    value: &T,
    options: ObjectOptions,
) -> Result<Vec<T>> {
    let wire = Wire::new(group, "all_gather_object", options)?;
    let (bytes, lengths) = wire.agree(write(value))?;
    let input = wire.tensor(&bytes)?;
    let outputs = wire.empty(&lengths)?;
    let done = wire.run(Collective::AllGather { input, outputs })?;
    wire.read_all(&done)
}

/// Every rank's value on `root`, in the order of ranks; `None` elsewhere.
///
/// Errors: as [`broadcast_object`].
pub fn gather_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    value: &T,
    root: u32,
    options: ObjectOptions,
) -> Result<Option<Vec<T>>> {
    let wire = Wire::new(group, "gather_object", options)?;
    let (bytes, lengths) = wire.agree(write(value))?;
    wire.of(&lengths, root)?;
    let input = wire.tensor(&bytes)?;
    let outputs = wire.empty(if wire.is(root) { &lengths } else { &[] })?;
    let done = wire.run(Collective::Gather { input, outputs, root })?;
    wire.is(root).then(|| wire.read_all(&done)).transpose()
}

/// To each rank its one of `root`'s values (`Some` there, one for each rank).
///
/// Errors: as [`broadcast_object`].
pub fn scatter_object<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    values: Option<&[T]>,
    root: u32,
    options: ObjectOptions,
) -> Result<T> {
    let wire = Wire::new(group, "scatter_object", options)?;
    let written: Result<Vec<Vec<u8>>> = match values.filter(|_| wire.is(root)) {
        Some(values) if values.len() == wire.world => values.iter().map(write).collect(),
        None if !wire.is(root) => Ok(Vec::new()),
        values => Err(Error::invalid(format!(
            "the root has {} values for {} ranks",
            values.map_or(0, <[T]>::len),
            wire.world
        ))),
    };
    let total = written.as_ref().map(|parts| parts.iter().map(Vec::len).sum());
    let lengths = wire.exchange(total.map_err(Clone::clone))?;
    let total = wire.of(&lengths, root)?;
    let parts = written?;
    // Each rank learns the length of its own part, then gets it.
    let inputs = parts
        .iter()
        .map(|part| wire.tensor(&(part.len() as u64).to_le_bytes()));
    let done = wire.run(Collective::Scatter {
        inputs: inputs.collect::<Result<_>>()?,
        output: wire.tensor(&[0; size_of::<u64>()])?,
        root,
    })?;
    let length = wire.bytes(done.last())?;
    let length = length.first_chunk().map_or(UNWRITTEN, |b| u64::from_le_bytes(*b));
    let fits = usize::try_from(length).ok().filter(|length| *length <= total);
    let length = fits.ok_or_else(|| {
        let text = format!("rank {root} sends {length} bytes of {total} that it told of");
        wire.name(Error::new(ErrorKind::Protocol, text)).with_peer(root)
    })?;
    let inputs = parts.iter().map(|part| wire.tensor(part));
    let done = wire.run(Collective::Scatter {
        inputs: inputs.collect::<Result<_>>()?,
        output: wire.tensor(&vec![0; length])?,
        root,
    })?;
    wire.read(done.last(), root)
}

fn write(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|e| Error::invalid(format!("the value cannot be written as JSON: {e}")))
}

/// Bytes over the group, on its device.
struct Wire<'a> {
    group: &'a dyn ProcessGroup,
    op: &'static str,
    device: Device,
    memory: Arc<dyn Accelerator>,
    stream: Arc<dyn Stream>,
    rank: u32,
    world: usize,
    limit: usize,
    deadline: Instant,
}

impl<'a> Wire<'a> {
    fn new(group: &'a dyn ProcessGroup, op: &'static str, options: ObjectOptions) -> Result<Self> {
        let info = group.info();
        let memory = accelerator(&info.device.kind)?;
        Ok(Self {
            stream: memory.new_stream(info.device.index, false)?,
            memory,
            group,
            op,
            device: info.device,
            rank: info.rank,
            world: info.world_size as usize,
            limit: options.limit,
            deadline: deadline_in(options.timeout),
        })
    }

    fn is(&self, root: u32) -> bool {
        self.rank == root
    }

    fn name(&self, error: Error) -> Error {
        error.with_op(self.op).with_rank(self.rank)
    }

    /// The root's one of all lengths.
    fn of(&self, lengths: &[usize], root: u32) -> Result<usize> {
        lengths.get(root as usize).copied().ok_or_else(|| {
            let text = format!("root {root} does not exist in a world of {}", self.world);
            self.name(Error::invalid(text))
        })
    }

    /// [`exchange`](Self::exchange) for what this rank has written, which comes back.
    fn agree(&self, written: Result<Vec<u8>>) -> Result<(Vec<u8>, Vec<usize>)> {
        let lengths = self.exchange(written.as_ref().map(Vec::len).map_err(Clone::clone))?;
        Ok((written?, lengths))
    }

    /// Tells all ranks how many bytes this one brings, or that it cannot. Gives the lengths of all, or an error on all.
    fn exchange(&self, mine: Result<usize>) -> Result<Vec<usize>> {
        let length = mine.as_ref().map_or(UNWRITTEN, |length| *length as u64);
        let said = [length.to_le_bytes(), (self.limit as u64).to_le_bytes()].concat();
        let input = self.tensor(&said)?;
        let output = self.tensor(&said.repeat(self.world))?;
        let pairs = vec![(input, output)];
        let done = self.run(Collective::AllGatherInto { pairs })?;
        mine.map_err(|e| self.name(e))?;
        let bytes = self.bytes(done.last())?;
        let words: Vec<u64> = bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| u64::from_le_bytes(*b))
            .collect();
        let said = words.as_chunks::<2>().0;
        if let Some((rank, _)) = (0u32..).zip(said).find(|(_, [length, _])| *length == UNWRITTEN) {
            let text = format!("rank {rank} has no value that can be sent; its own error says why");
            return Err(self.name(Error::invalid(text)).with_peer(rank));
        }
        let total = said
            .iter()
            .fold(0u64, |sum, [length, _]| sum.saturating_add(*length));
        let least = (0u32..).zip(said).min_by_key(|(_, [_, limit])| *limit);
        if let Some((rank, [_, limit])) = least.filter(|(_, [_, limit])| total > *limit) {
            let text =
                format!("the values have {total} bytes; rank {rank} takes {limit} (`ObjectOptions::limit`)");
            return Err(self.name(Error::invalid(text)));
        }
        Ok(said
            .iter()
            .map(|[length, _]| usize::try_from(*length).unwrap_or(usize::MAX))
            .collect())
    }

    fn tensor(&self, bytes: &[u8]) -> Result<Tensor> {
        let mut tensor = self.memory.alloc(self.device.index, DType::U8, &[bytes.len()])?;
        self.memory.copy_in(bytes, &mut tensor, &*self.stream)?;
        Ok(tensor)
    }

    fn empty(&self, lengths: &[usize]) -> Result<Vec<Tensor>> {
        let new = |length: &usize| self.memory.alloc(self.device.index, DType::U8, &[*length]);
        lengths.iter().map(new).collect()
    }

    fn run(&self, op: Collective) -> Result<Vec<Tensor>> {
        let options = SubmitOptions {
            stream: Some(self.stream.clone()),
            ..SubmitOptions::by(self.deadline)
        };
        let work = self.group.run(op, options).map_err(|rejected| rejected.error)?;
        Ok(work.take()?.tensors)
    }

    fn bytes(&self, tensor: Option<&Tensor>) -> Result<Vec<u8>> {
        let nothing = || Error::new(ErrorKind::Internal, "the operation gave no tensor back");
        let tensor = tensor.ok_or_else(nothing)?;
        let mut bytes = vec![0; tensor.byte_len()];
        self.memory.copy_out(tensor, &mut bytes, &*self.stream)?;
        Ok(bytes)
    }

    fn read<T: DeserializeOwned>(&self, tensor: Option<&Tensor>, from: u32) -> Result<T> {
        serde_json::from_slice(&self.bytes(tensor)?).map_err(|e| {
            let text = format!(
                "the value of rank {from} is no {}: {e}",
                std::any::type_name::<T>()
            );
            self.name(Error::new(ErrorKind::Corrupt, text)).with_peer(from)
        })
    }

    /// The outputs behind the input.
    fn read_all<T: DeserializeOwned>(&self, done: &[Tensor]) -> Result<Vec<T>> {
        let outputs = (0u32..).zip(done.iter().skip(1));
        outputs
            .map(|(rank, output)| self.read(Some(output), rank))
            .collect()
    }
}
