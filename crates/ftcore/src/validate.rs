//! The one place where arguments are checked. Backends receive [`Checked`] and nothing else.
//!
//! Checked here: the operation and dtype are advertised, one dtype per call, sizes and splits fit the world, ranks
//! exist, memory is on a device that is served and nothing overlaps. A refusal gives the tensors back ([`Rejected`]).

use crate::memory::{find_overlap, not_by_parts};
use crate::{
    Capabilities, Collective, DType, Error, ErrorKind, Feature, GroupInfo, OpKind, ReduceOp, SubmitOptions,
    Tensor,
};

/// A collective that passed validation. Only [`Checked::new`] makes one.
#[derive(Debug)]
pub struct Checked(Collective);

impl Checked {
    /// Checks `op` against the group's state and capabilities.
    pub fn new(
        op: Collective,
        info: &GroupInfo,
        capabilities: &Capabilities,
        options: &SubmitOptions,
    ) -> Result<Self, Box<Rejected>> {
        match check(&op, info, capabilities, options) {
            Ok(()) => Ok(Self(op)),
            Err(e) => {
                let mut error = e.with_op(op.kind().name()).with_rank(info.rank);
                if let Some(d) = op.dtype() {
                    error = error.with_data(d, op.count());
                }
                Err(Box::new(Rejected { error, op }))
            }
        }
    }

    /// The collective.
    pub fn get(&self) -> &Collective {
        &self.0
    }

    /// The collective, by value.
    pub fn into_inner(self) -> Collective {
        self.0
    }
}

/// A refused call: why, and everything that was passed in. Nothing was sent.
#[derive(Debug)]
pub struct Rejected {
    /// Why.
    pub error: Error,
    /// What was passed in.
    pub op: Collective,
}

impl std::fmt::Display for Rejected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

/// By hand: its text is that of `error`, so its source is that of `error` too; thiserror's `transparent` allows no second field.
impl std::error::Error for Rejected {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.error)
    }
}

impl From<Box<Rejected>> for Error {
    fn from(r: Box<Rejected>) -> Self {
        r.error
    }
}

fn ensure(ok: bool, message: impl FnOnce() -> String) -> Result<(), Error> {
    if ok {
        Ok(())
    } else {
        Err(Error::invalid(message()))
    }
}

fn check(
    op: &Collective,
    info: &GroupInfo,
    caps: &Capabilities,
    options: &SubmitOptions,
) -> Result<(), Error> {
    crate::forked::refuse_child()?;
    if info.world_size == 0 {
        return Err(Error::new(ErrorKind::InvalidState, "the group is not configured"));
    }
    let kind = op.kind();
    if !caps.ops.contains(kind) {
        let instead = kind.apart().filter(|k| caps.ops.contains(*k));
        let instead = instead.map_or(String::new(), |k| format!("; give input and output apart ({k})"));
        return Err(Error::unsupported(format!(
            "backend '{}' does not offer {kind}{instead}",
            info.backend
        )));
    }
    let world = info.world_size as usize;
    let rank_exists = |what: &str, r: u32| {
        ensure(r < info.world_size, || {
            format!("{what} {r} does not exist in a world of {world}")
        })
    };
    let per_rank = |what: &str, n: usize| {
        ensure(n == world, || {
            format!("{what} has {n} tensors; the world has {world} ranks")
        })
    };

    let tensors = op.tensors();
    if let Some(first) = tensors.first() {
        let dtype = first.dtype();
        let odd = tensors.iter().enumerate().find(|(_, t)| t.dtype() != dtype);
        if let Some((i, t)) = odd.filter(|_| kind != OpKind::Batch) {
            return Err(Error::invalid(format!(
                "tensor {i} is {}, tensor 0 is {dtype}; one dtype per call",
                t.dtype()
            )));
        }
        let odd = tensors
            .iter()
            .enumerate()
            .find(|(_, t)| t.is_complex() != first.is_complex());
        if let Some((i, t)) = odd.filter(|_| kind != OpKind::Batch) {
            return Err(Error::invalid(format!(
                "tensor {i} holds {}, tensor 0 {}; view both as complex or both as real",
                t.value_name(),
                first.value_name()
            )));
        }
        for (i, t) in tensors.iter().enumerate() {
            if !caps.serves(&t.device().kind) {
                return Err(Error::invalid(format!(
                    "tensor {i} is on {}; backend '{}' serves {}",
                    t.device(),
                    info.backend,
                    caps.devices.join(", ")
                )));
            }
            if !caps.moves.contains(t.dtype()) {
                return Err(Error::unsupported(format!(
                    "backend '{}' does not move {}",
                    info.backend,
                    t.dtype()
                )));
            }
        }
        // A batch is checked one by one, below.
        if let Some(i) = tensors.iter().position(|t| t.is_shared())
            && !matches!(kind, OpKind::Send | OpKind::Batch)
        {
            return Err(Error::invalid(format!(
                "tensor {i} is memory that others read, too: it can be sent only, and {kind} may write to it"
            )));
        }
        if let Some((a, b)) = find_overlap(&tensors) {
            let in_place = match kind {
                OpKind::AllGatherInto => {
                    "; where the input is this rank's part of the output, give all_gather_in_place that tensor alone"
                }
                OpKind::ReduceScatterInto => {
                    "; where the output is this rank's part of the input, give reduce_scatter_in_place that tensor alone"
                }
                _ => "",
            };
            return Err(Error::invalid(format!(
                "tensors {a} and {b} share memory; every tensor of a call needs its own{in_place}"
            )));
        }
    }
    let complex = tensors
        .first()
        .filter(|t| t.is_complex() && kind != OpKind::Batch);
    let reduces = |r: ReduceOp, dtype: Option<DType>| {
        if let Some(error) = complex.and_then(|t| not_by_parts(r, t.value_name())) {
            return Err(error);
        }
        match dtype {
            Some(d) if !caps.reduces(r, d) => Err(Error::unsupported(format!(
                "backend '{}' does not reduce {d} with {r}",
                info.backend
            ))),
            _ => Ok(()),
        }
    };
    if !options.contribute {
        ensure(kind.is_reduction(), || {
            format!("contribute = false has a meaning for reductions only, not for {kind}")
        })?;
        if !caps.has(Feature::Contributors) {
            return Err(Error::unsupported(format!(
                "backend '{}' does not count contributors",
                info.backend
            )));
        }
    }
    let not_empty = |t: &[Tensor]| ensure(!t.is_empty(), || "the list of tensors is empty".to_string());
    match op {
        Collective::AllReduce { tensors, op: r } => {
            not_empty(tensors)?;
            reduces(*r, op.dtype())
        }
        Collective::Broadcast { tensors, root } => {
            not_empty(tensors)?;
            rank_exists("root", *root)
        }
        Collective::Reduce { op: r, root, .. } => {
            rank_exists("root", *root)?;
            reduces(*r, op.dtype())
        }
        Collective::AllGather { input, outputs } => {
            per_rank("outputs", outputs.len())?;
            own_part(outputs, info.rank, input, "input", "outputs")
        }
        Collective::AllGatherInto { pairs } => {
            ensure(!pairs.is_empty(), || "the list of pairs is empty".to_string())?;
            pairs
                .iter()
                .try_for_each(|(i, o)| world_times(i, o, world, "input", "output"))
        }
        Collective::AllGatherInPlace { tensors } => {
            not_empty(tensors)?;
            parts_for_all(tensors, world)
        }
        Collective::Gather { input, outputs, root } => {
            rank_exists("root", *root)?;
            root_list("outputs", outputs, input, *root, info)
        }
        Collective::Scatter { inputs, output, root } => {
            rank_exists("root", *root)?;
            root_list("inputs", inputs, output, *root, info)
        }
        Collective::ReduceScatter {
            inputs,
            output,
            op: r,
        } => {
            per_rank("inputs", inputs.len())?;
            own_part(inputs, info.rank, output, "output", "inputs")?;
            reduces(*r, op.dtype())
        }
        Collective::ReduceScatterInto { pairs, op: r } => {
            ensure(!pairs.is_empty(), || "the list of pairs is empty".to_string())?;
            pairs
                .iter()
                .try_for_each(|(i, o)| world_times(o, i, world, "output", "input"))?;
            reduces(*r, op.dtype())
        }
        Collective::ReduceScatterInPlace { tensors, op: r } => {
            not_empty(tensors)?;
            parts_for_all(tensors, world)?;
            reduces(*r, op.dtype())
        }
        Collective::AllToAll { inputs, outputs } => {
            per_rank("inputs", inputs.len())?;
            per_rank("outputs", outputs.len())?;
            let own = |list: &[Tensor]| list.get(info.rank as usize).map_or(0, Tensor::count);
            own_parts(info.rank, own(inputs), own(outputs))
        }
        Collective::AllToAllInto {
            input,
            output,
            input_splits,
            output_splits,
        } => {
            splits("input_splits", input_splits, input, world)?;
            splits("output_splits", output_splits, output, world)?;
            let own = |splits: &[usize], tensor: &Tensor| match splits {
                [] => tensor.count() / world,
                splits => splits.get(info.rank as usize).copied().unwrap_or(0),
            };
            own_parts(info.rank, own(input_splits, input), own(output_splits, output))
        }
        Collective::Send { peer, tag, .. } => {
            p2p_peer(*peer, info)?;
            matched_by(*tag, info, caps)
        }
        Collective::Recv { peer, tag, .. } => {
            match peer {
                Some(p) => p2p_peer(*p, info)?,
                None if caps.has(Feature::RecvAny) => {}
                None => {
                    return Err(Error::unsupported(format!(
                        "backend '{}' cannot receive from any rank: its library receives from the rank that it is told; name the \
                         sender, or let gloo match the messages (messages:gloo in the backend specification)",
                        info.backend
                    )));
                }
            }
            matched_by(*tag, info, caps)
        }
        Collective::Barrier | Collective::MonitoredBarrier { .. } => Ok(()),
        Collective::Batch { ops } => {
            ensure(!ops.is_empty(), || "the batch is empty".to_string())?;
            ops.iter().try_for_each(|o| {
                ensure(matches!(o.kind(), OpKind::Send | OpKind::Recv), || {
                    format!("a batch holds sends and receives only, not {}", o.kind())
                })?;
                check(o, info, caps, options)
            })
        }
    }
}

fn p2p_peer(peer: u32, info: &GroupInfo) -> Result<(), Error> {
    ensure(peer < info.world_size, || {
        format!("peer {peer} does not exist in a world of {}", info.world_size)
    })?;
    ensure(peer != info.rank, || format!("peer {peer} is this rank itself"))
}

/// Where messages of a pair match in the order in which they are sent, a tag would be a promise that is not kept: a receive could
/// get another message of the same size.
fn matched_by(tag: u32, info: &GroupInfo, caps: &Capabilities) -> Result<(), Error> {
    if tag == 0 || caps.has(Feature::Tags) {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "tag {tag}: backend '{}' matches the messages of two ranks in the order in which they are sent, not by tag; give tag 0 \
         and receive in that order, or let gloo match them (messages:gloo in the backend specification)",
        info.backend
    )))
}

fn own_part(
    list: &[Tensor],
    rank: u32,
    part: &Tensor,
    part_name: &str,
    list_name: &str,
) -> Result<(), Error> {
    let own = list.get(rank as usize).map_or(0, Tensor::count);
    ensure(own == part.count(), || {
        format!(
            "{part_name} has {} elements, {list_name}[{rank}] has {own}: they must be equal",
            part.count()
        )
    })
}

/// What a rank has for itself in an exchange is also what it expects of itself.
fn own_parts(rank: u32, has: usize, expects: usize) -> Result<(), Error> {
    ensure(has == expects, || {
        format!(
            "rank {rank} has {has} elements for itself and expects {expects} of itself: they must be equal"
        )
    })
}

fn world_times(
    small: &Tensor,
    large: &Tensor,
    world: usize,
    small_name: &str,
    large_name: &str,
) -> Result<(), Error> {
    ensure(small.count().checked_mul(world) == Some(large.count()), || {
        format!(
            "{large_name} has {} elements; it needs world × {small_name} = {world} × {}",
            large.count(),
            small.count()
        )
    })
}

/// The elements of `tensor` that are never parted.
fn together(tensor: &Tensor) -> usize {
    if tensor.is_complex() { 2 } else { 1 }
}

fn parts_for_all(tensors: &[Tensor], world: usize) -> Result<(), Error> {
    let mut all = tensors.iter().enumerate();
    let odd = all.find(|(_, t)| !(t.count() / together(t)).is_multiple_of(world));
    odd.map_or(Ok(()), |(i, t)| {
        Err(Error::invalid(format!(
            "tensor {i} has {} values of {}; in place it needs as many for each of {world} ranks",
            t.count() / together(t),
            t.value_name()
        )))
    })
}

fn root_list(name: &str, list: &[Tensor], own: &Tensor, root: u32, info: &GroupInfo) -> Result<(), Error> {
    if info.rank != root {
        return ensure(list.is_empty(), || {
            format!("{name} must be empty on ranks other than the root {root}")
        });
    }
    ensure(list.len() == info.world_size as usize, || {
        format!(
            "{name} has {} tensors on the root; the world has {} ranks",
            list.len(),
            info.world_size
        )
    })?;
    own_part(list, info.rank, own, "this rank's part", name)
}

fn splits(name: &str, splits: &[usize], tensor: &Tensor, world: usize) -> Result<(), Error> {
    let together = together(tensor);
    if splits.is_empty() {
        return ensure((tensor.count() / together).is_multiple_of(world), || {
            format!(
                "{} values of {} do not divide evenly among {world} ranks; give {name}",
                tensor.count() / together,
                tensor.value_name()
            )
        });
    }
    if let Some((i, n)) = splits
        .iter()
        .enumerate()
        .find(|(_, n)| !n.is_multiple_of(together))
    {
        return Err(Error::invalid(format!(
            "{name}[{i}] is {n} elements, which parts a {} in two",
            tensor.value_name()
        )));
    }
    ensure(splits.len() == world, || {
        format!("{name} has {} entries; the world has {world} ranks", splits.len())
    })?;
    let sum = splits.iter().try_fold(0usize, |a, &s| a.checked_add(s));
    ensure(sum == Some(tensor.count()), || {
        format!(
            "{name} sum to {sum:?}; the tensor has {} elements",
            tensor.count()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DTypeSet, Device, Epoch, FeatureSet, OpSet, names};

    #[test]
    fn an_exchange_has_as_much_for_its_own_rank_as_it_expects_of_it() {
        let info = GroupInfo {
            backend: "x".into(),
            name: "g".into(),
            rank: 1,
            world_size: 2,
            epoch: Epoch(1),
            device: Device::CPU,
            dropped_options: Vec::new(),
        };
        let offers = Capabilities {
            ops: OpSet::of(&OpKind::ALL),
            moves: DTypeSet::of(&DType::ALL),
            reduces: [DTypeSet::of(&DType::ALL); ReduceOp::COUNT],
            features: FeatureSet::NONE,
            options: Vec::new(),
            devices: names(&["cpu"]),
            notes: Vec::new(),
        };
        let f = |count| Tensor::zeros(DType::F32, count);
        let whole = |counts: [usize; 2], splits: [&[usize]; 2]| Collective::AllToAllInto {
            input: f(counts[0]),
            output: f(counts[1]),
            input_splits: splits[0].to_vec(),
            output_splits: splits[1].to_vec(),
        };
        let lists = |sent: [usize; 2], expected: [usize; 2]| Collective::AllToAll {
            inputs: sent.map(f).into(),
            outputs: expected.map(f).into(),
        };
        // Of rank 1: 4 elements, and 2 or 3.
        for wrong in [
            whole([8, 4], [&[], &[]]),
            whole([8, 4], [&[], &[1, 3]]),
            whole([8, 4], [&[4, 4], &[]]),
            whole([8, 4], [&[4, 4], &[1, 3]]),
            lists([4, 4], [4, 2]),
        ] {
            let refused = Checked::new(wrong, &info, &offers, &SubmitOptions::default()).unwrap_err();
            assert_eq!(refused.error.kind(), ErrorKind::InvalidArgument);
            let text = refused.error.to_string();
            assert!(text.contains("rank 1 has 4 elements for itself"), "{text}");
        }
        for right in [
            whole([8, 4], [&[], &[0, 4]]),
            whole([8, 4], [&[6, 2], &[]]),
            lists([1, 2], [3, 2]),
        ] {
            Checked::new(right, &info, &offers, &SubmitOptions::default()).unwrap();
        }
    }
}
