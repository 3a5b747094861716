//! Collectives as work on the group's stream: preparation, one group of NCCL calls, finishing touches, an event. The host waits for
//! none of it.
//!
//! A reduction may need its input as something else (identity elements of a rank that does not contribute, floats as ordered integers,
//! bytes made 0 or 1) and its output turned back; `Reduction` says what. The contributors are one integer reduced in the same group.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use ftcore::{Collective, DType, Error, Event, OpKind, ReduceOp, Result, Stream, Tensor, engine};
use nccl_sys::{DataType, RedOp, dtype, redop};

use crate::cuda::gpu::Gpu;
use crate::cuda::kernels::{Extreme, Kernel, key_dtype};
use crate::cuda::memory::Block;
use crate::cuda::raw::{Span, StreamHandle};
use crate::cuda::slots::Slot;
use crate::driver::Shared;
use crate::raw::{Calls, factor_bits, native};

/// Device memory beside an operation's tensors: blocks for intermediate results, and the slot in which the contributors are counted. Dropped
/// when the device is done.
pub(crate) struct Scratch {
    gpu: Arc<Gpu>,
    blocks: Vec<Block>,
    slot: Option<Slot>,
    /// The number of contributors is in the slot.
    counted: bool,
    contributors: u32,
}

impl Scratch {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Self {
        Self {
            gpu: gpu.clone(),
            blocks: Vec::new(),
            slot: None,
            counted: false,
            contributors: 0,
        }
    }
}

impl engine::Scratch for Scratch {
    fn contributors(&self) -> u32 {
        match (&self.slot, self.gpu.slots()) {
            (Some(slot), Ok(slots)) if self.counted => slots.read(slot),
            _ => self.contributors,
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let (Some(slot), Ok(slots)) = (self.slot.take(), self.gpu.slots()) {
            slots.give_back(slot);
        }
    }
}

/// Enqueues `op` until `deadline`; what it needs besides its tensors goes into `scratch`, also of what fails half way.
pub(crate) fn collective(
    shared: &Shared,
    op: &Collective,
    contribute: bool,
    after: Option<&dyn Event>,
    deadline: Instant,
    scratch: &mut Scratch,
) -> Result<()> {
    let job = Job {
        shared,
        kind: op.kind(),
        dtype: op.dtype(),
        deadline,
        stream: shared.stream.handle(),
        scratch: RefCell::new(scratch),
    };
    job.run(op, contribute, after)
}

/// How a reduction is carried out by NCCL.
#[derive(Debug, Clone, Copy)]
struct Reduction {
    /// Of the elements that NCCL sees.
    wire: DType,
    element: DataType,
    op: RedOp,
    /// Made of the caller's factor, to be freed.
    made: bool,
    before: Before,
    after: After,
    identity: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Key(Extreme),
    Bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    Nothing,
    Unkey(Extreme),
    Parity,
    Divide,
    /// By a factor, of which these are the bits.
    Multiply(u64),
}

/// The bits of one in `d`.
fn one(d: DType) -> u64 {
    match d {
        DType::F64 => 1f64.to_bits(),
        DType::F32 => u64::from(1f32.to_bits()),
        DType::F16 => 0x3C00,
        DType::BF16 => 0x3F80,
        DType::F8E4M3 => 0x38,
        DType::F8E5M2 => 0x3C,
        _ => 1,
    }
}

/// The bits of the value that loses every comparison.
fn loser(extreme: Extreme, wire: DType, keyed: Option<DType>) -> u64 {
    if let Some(float) = keyed {
        // Minus or plus infinity as a key: below NaN's, above everything else of its side.
        return match (float, extreme) {
            (DType::F64, Extreme::Max) => f64::NEG_INFINITY.to_bits() ^ (u64::MAX >> 1),
            (DType::F64, Extreme::Min) => f64::INFINITY.to_bits(),
            (_, Extreme::Max) => u64::from(f32::NEG_INFINITY.to_bits() ^ (u32::MAX >> 1)),
            (_, Extreme::Min) => u64::from(f32::INFINITY.to_bits()),
        };
    }
    let bits = 8 * wire.size() as u32;
    let all = u64::MAX >> (64 - bits);
    let signed = matches!(wire, DType::I64 | DType::I32 | DType::I8);
    match (extreme, signed) {
        (Extreme::Max, true) => 1 << (bits - 1),
        (Extreme::Max, false) => 0,
        (Extreme::Min, true) => all >> 1,
        (Extreme::Min, false) => all,
    }
}

struct Job<'a> {
    shared: &'a Shared,
    kind: OpKind,
    dtype: Option<DType>,
    deadline: Instant,
    stream: StreamHandle,
    scratch: RefCell<&'a mut Scratch>,
}

type Finish = Vec<(Kernel, Span, Span, usize)>;

impl Job<'_> {
    fn run(&self, op: &Collective, contribute: bool, after: Option<&dyn Event>) -> Result<()> {
        let _inside = self.shared.gpu.enter()?;
        if let Some(event) = after {
            self.shared.stream.wait(event)?;
        }
        match op {
            Collective::AllReduce { tensors, op } => {
                let spans = tensors
                    .iter()
                    .map(|t| (Span::of(t), Some(Span::of(t)), t.count()))
                    .collect();
                self.reduction(
                    *op,
                    dtype_of(tensors.first()),
                    contribute,
                    spans,
                    |calls, r, at, s| calls.all_reduce(at.from, at.to, at.count, r.element, r.op, s),
                )
            }
            Collective::Reduce { tensor, op, root } => {
                let data = Span::of(tensor);
                let is_root = self.shared.place.rank == *root;
                let spans = vec![(data, is_root.then_some(data), tensor.count())];
                self.reduction(*op, tensor.dtype(), contribute, spans, |calls, r, at, s| {
                    calls.reduce(at.from, at.to, at.count, r.element, r.op, *root, s)
                })
            }
            Collective::ReduceScatter { inputs, output, op } => {
                let own = self.shared.place.rank;
                let out = Span::of(output);
                let spans = (0u32..).zip(inputs);
                let spans = spans.map(|(owner, i)| (Span::of(i), (owner == own).then_some(out), i.count()));
                // One reduction per part, each of any size with its owner as the root.
                self.reduction(
                    *op,
                    output.dtype(),
                    contribute,
                    spans.collect(),
                    |calls, r, at, s| calls.reduce(at.from, at.to, at.count, r.element, r.op, at.index, s),
                )
            }
            Collective::ReduceScatterInto { pairs, op } => {
                let spans = pairs
                    .iter()
                    .map(|(i, o)| (Span::of(i), Some(Span::of(o)), i.count()))
                    .collect();
                let world = self.shared.place.world as usize;
                let d = dtype_of(pairs.first().map(|p| &p.0));
                self.reduction(*op, d, contribute, spans, move |calls, r, at, s| {
                    calls.reduce_scatter(at.from, at.to, at.count / world, r.element, r.op, s)
                })
            }
            Collective::ReduceScatterInPlace { tensors, op } => {
                let (rank, world) = (self.shared.place.rank as usize, self.shared.place.world as usize);
                let parts = movement::own_parts(tensors, rank, world)?;
                let spans = tensors.iter().zip(parts);
                let spans = spans
                    .map(|(t, (own, whole))| (whole, Some(own), t.count()))
                    .collect();
                let d = dtype_of(tensors.first());
                self.reduction(*op, d, contribute, spans, move |calls, r, at, s| {
                    calls.reduce_scatter(at.from, at.to, at.count / world, r.element, r.op, s)
                })
            }
            Collective::Barrier => self.counted(true, |_, _| Ok(()), Vec::new(), true),
            movement => self.movement(movement),
        }
    }

    fn scratch(&self, bytes: usize) -> Result<Span> {
        let block = Block::on(&self.shared.gpu, bytes, self.stream)?;
        let span = block.span();
        self.scratch.borrow_mut().blocks.push(block);
        Ok(span)
    }

    /// What `op` on `d` means for NCCL.
    fn plan(&self, op: ReduceOp, d: DType, contribute: bool) -> Result<Reduction> {
        let shared = self.shared;
        // The zeros of a rank that abstains stay zeros: infinity would make NaN of them. Ranks may have different factors.
        let op = match op {
            ReduceOp::PremulSum(_) if !contribute => ReduceOp::PremulSum(1.0),
            op => op,
        };
        let simple = |op: RedOp, identity: u64| -> Result<Reduction> {
            Ok(Reduction {
                wire: d,
                element: native(d).ok_or_else(|| Error::unsupported(format!("NCCL does not reduce {d}")))?,
                op,
                made: false,
                before: Before::Nothing,
                after: After::Nothing,
                identity,
            })
        };
        if d == DType::Bool {
            let (op, identity, after) = match op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => (redop::MAX, 0, After::Nothing),
                // A sum of truths keeps its parity when it wraps around.
                ReduceOp::Bxor => (redop::SUM, 0, After::Parity),
                _ => (redop::MIN, 1, After::Nothing),
            };
            return Ok(Reduction {
                wire: DType::U8,
                element: dtype::UINT8,
                op,
                made: false,
                before: Before::Bool,
                after,
                identity,
            });
        }
        let extreme = match op {
            ReduceOp::Max => Some((Extreme::Max, redop::MAX)),
            ReduceOp::Min => Some((Extreme::Min, redop::MIN)),
            _ => None,
        };
        match (op, extreme) {
            (_, Some((extreme, op))) if d.is_float() => {
                let wire = key_dtype(d);
                Ok(Reduction {
                    wire,
                    element: native(wire).unwrap_or(dtype::INT32),
                    op,
                    made: false,
                    before: Before::Key(extreme),
                    after: After::Unkey(extreme),
                    identity: loser(extreme, wire, Some(d)),
                })
            }
            (_, Some((extreme, op))) => simple(op, loser(extreme, d, None)),
            (ReduceOp::Sum, _) => simple(redop::SUM, 0),
            (ReduceOp::Product, _) => simple(redop::PROD, one(d)),
            (ReduceOp::Avg, _) if !shared.settings.count_contributors => simple(redop::AVG, 0),
            (ReduceOp::Avg, _) => Ok(Reduction {
                after: After::Divide,
                ..simple(redop::SUM, 0)?
            }),
            // NCCL scales what one rank has in a kernel of its own, which in 2.28.9 leaves out the last elements.
            (ReduceOp::PremulSum(factor), _) if shared.place.world == 1 => Ok(Reduction {
                after: After::Multiply(factor_bits(factor, d)?),
                ..simple(redop::SUM, 0)?
            }),
            (ReduceOp::PremulSum(factor), _) => Ok(Reduction {
                made: true,
                ..simple(shared.comm.premul_sum(factor, d)?, 0)?
            }),
            (other, _) => Err(Error::unsupported(format!("NCCL does not reduce with {other}"))),
        }
    }

    /// The input as NCCL is to see it. `in_place`: it may be changed, because the result replaces it.
    fn wire_input(
        &self,
        r: &Reduction,
        from: Span,
        count: usize,
        contribute: bool,
        in_place: bool,
    ) -> Result<Span> {
        let gpu = &self.shared.gpu;
        let bytes = count * r.wire.size();
        if !contribute {
            let to = if in_place && r.wire.size() * count == from.bytes() {
                from
            } else {
                self.scratch(bytes)?
            };
            gpu.driver.fill(to, r.wire.size(), r.identity, self.stream)?;
            return Ok(to);
        }
        match r.before {
            Before::Nothing => Ok(from),
            Before::Bool => {
                let to = if in_place { from } else { self.scratch(bytes)? };
                gpu.launch(Kernel::Bool, from, to, count, self.stream)?;
                Ok(to)
            }
            Before::Key(extreme) => {
                let to = self.scratch(bytes)?;
                let d = element_of(from, count);
                gpu.launch(Kernel::Key(extreme, self.float(d)?), from, to, count, self.stream)?;
                Ok(to)
            }
        }
    }

    /// The float type of this operation, whose size is `size`.
    fn float(&self, size: usize) -> Result<DType> {
        self.dtype
            .filter(|d| d.is_float() && (size == 0 || d.size() == size))
            .ok_or_else(|| Error::invalid("the elements are not floats"))
    }

    /// A reduction of `spans` (input, output if this rank gets the result, elements of the input).
    fn reduction(
        &self,
        op: ReduceOp,
        d: DType,
        contribute: bool,
        spans: Vec<(Span, Option<Span>, usize)>,
        call: impl Fn(&Calls<'_>, &Reduction, Wire, StreamHandle) -> Result<()>,
    ) -> Result<()> {
        let r = self.plan(op, d, contribute)?;
        let mut wires = Vec::new();
        let mut finish: Finish = Vec::new();
        for (index, (from, to, count)) in (0u32..).zip(spans) {
            // What is in the other ranks' parts of a reduce-scatter in place is undefined afterwards.
            let same = to == Some(from) || self.kind == OpKind::ReduceScatterInPlace;
            let wire_from = self.wire_input(&r, from, count, contribute, same)?;
            let wire_to = match to {
                Some(to) => {
                    let outputs = to.bytes() / d.size();
                    let wire = match r.before {
                        Before::Key(_) => self.scratch(outputs * r.wire.size())?,
                        _ => to,
                    };
                    self.finishing(&r, d, wire, to, outputs, &mut finish)?;
                    wire
                }
                // Not written on this rank, but NCCL wants an address.
                None => wire_from,
            };
            wires.push(Wire {
                from: wire_from,
                to: wire_to,
                count,
                index,
            });
            let bytes = count * d.size();
            let (sent, received) = match self.kind {
                OpKind::ReduceScatter if to.is_some() => (0, 0),
                OpKind::ReduceScatter => (bytes, 0),
                _ => (self.share(bytes), self.share(bytes)),
            };
            self.traffic(sent, received);
        }
        let done = self.counted(
            contribute,
            |calls, s| {
                wires
                    .iter()
                    .filter(|w| w.count > 0)
                    .try_for_each(|w| call(calls, &r, *w, s))
            },
            finish,
            true,
        );
        if r.made {
            self.shared.comm.drop_op(r.op);
        }
        done
    }

    fn finishing(
        &self,
        r: &Reduction,
        d: DType,
        wire: Span,
        to: Span,
        count: usize,
        finish: &mut Finish,
    ) -> Result<()> {
        match r.after {
            After::Nothing => {}
            After::Unkey(extreme) => finish.push((Kernel::Unkey(extreme, d), wire, to, count)),
            After::Parity => finish.push((Kernel::Parity, to, to, count)),
            // The second address is filled in by `counted`.
            After::Divide => finish.push((Kernel::Div(d), to, to, count)),
            After::Multiply(bits) => {
                let factor = self.scratch(d.size())?;
                self.shared.gpu.driver.fill(factor, d.size(), bits, self.stream)?;
                finish.push((Kernel::Mul(d), to, factor, count));
            }
        }
        Ok(())
    }

    /// One group of `calls`, with the number of contributors reduced beside them if this is a reduction that counts, and `finish`
    /// afterwards.
    fn counted(
        &self,
        contribute: bool,
        calls: impl FnOnce(&Calls<'_>, StreamHandle) -> Result<()>,
        finish: Finish,
        reduction: bool,
    ) -> Result<()> {
        let shared = self.shared;
        let gpu = &shared.gpu;
        let barrier = self.kind == OpKind::Barrier;
        let count = match reduction && (shared.settings.count_contributors || barrier) {
            true => Some(self.slot(!barrier)?),
            false => None,
        };
        shared.comm.group(self.deadline, &|| shared.failure(), |c| {
            calls(c, self.stream)?;
            if let Some(count) = count {
                let own = gpu.slots()?.constant(contribute)?;
                c.all_reduce(own, count, 1, dtype::INT32, redop::SUM, self.stream)?;
            }
            Ok(())
        })?;
        for (kernel, a, b, n) in finish {
            let b = match (kernel, count) {
                (Kernel::Div(_), Some(count)) => count,
                _ => b,
            };
            gpu.launch(kernel, a, b, n, self.stream)?;
        }
        let mut scratch = self.scratch.borrow_mut();
        if reduction && !barrier {
            scratch.contributors = shared.place.world;
        }
        match &scratch.slot {
            Some(slot) if !barrier => gpu.slots()?.fetch(slot, self.stream),
            _ => Ok(()),
        }
    }

    /// A slot for the number of contributors, which is the completion's if it is `counted`.
    fn slot(&self, counted: bool) -> Result<Span> {
        let slots = self.shared.gpu.slots()?;
        let slot = slots.take()?;
        let span = slots.span(&slot);
        let mut scratch = self.scratch.borrow_mut();
        (scratch.slot, scratch.counted) = (Some(slot), counted);
        span
    }

    /// This rank's part of the bytes that a ring moves for `bytes` per rank.
    fn share(&self, bytes: usize) -> usize {
        let world = self.shared.place.world as usize;
        2 * bytes * (world - 1) / world.max(1)
    }
}

/// What NCCL sees of one tensor.
#[derive(Debug, Clone, Copy)]
struct Wire {
    from: Span,
    to: Span,
    count: usize,
    /// Which tensor of the operation it is.
    index: u32,
}

fn dtype_of(tensor: Option<&Tensor>) -> DType {
    tensor.map_or(DType::U8, Tensor::dtype)
}

fn element_of(span: Span, count: usize) -> usize {
    span.bytes().checked_div(count).unwrap_or(0)
}

mod movement;
