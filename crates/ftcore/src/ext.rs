//! The named collectives, written once on top of `submit`.

use std::collections::VecDeque;
use std::time::Instant;

use crate::joined::joined;
use crate::memory::lend;
use crate::{
    Checked, Collective, Completion, Element, Error, Failed, Feature, OpKind, ProcessGroup, ReduceOp,
    Rejected, Result, SubmitOptions, Tensor, Work,
};

/// What to reduce with, over which ranks, from which root: the named collectives of every [`ProcessGroup`].
///
/// Each takes its tensors by value, validates them (a refusal gives them back in [`Rejected`]), submits, and returns a
/// [`Work`] that gives them back when done. All wait with the group's default time-out; `run` takes other options.
///
/// ```
/// use ftcore::{ProcessGroup, ProcessGroupExt as _, ReduceOp, Result, Tensor};
///
/// fn some(group: &dyn ProcessGroup) -> Result<()> {
///     let mut mine = [1.0_f32; 4];
///     group.all_reduce_slice(&mut mine, ReduceOp::Max)?; // memory of one's own, blocking
///     let work = group.broadcast(Tensor::from_slice(&mine), 0)?; // a tensor that is given away, and comes back
///     group.barrier()?;
///     work.wait_done()?;
///     println!("{:?}", work.take_tensor()?.as_slice::<f32>()?);
///     Ok(())
/// }
/// ```
pub trait ProcessGroupExt: ProcessGroup {
    /// Validates and submits `op`.
    fn run(&self, op: Collective, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let checked = Checked::new(op, &self.info(), self.capabilities(), &options)?;
        self.submit(checked, options)
    }

    /// All-reduces one tensor in place.
    fn all_reduce(&self, tensor: Tensor, op: ReduceOp) -> Result<Work, Box<Rejected>> {
        self.all_reduce_coalesced(vec![tensor], op)
    }

    /// All-reduces several tensors of one dtype as one operation.
    fn all_reduce_coalesced(&self, tensors: Vec<Tensor>, op: ReduceOp) -> Result<Work, Box<Rejected>> {
        self.run(Collective::AllReduce { tensors, op }, SubmitOptions::default())
    }

    /// Broadcasts the root's tensor.
    fn broadcast(&self, tensor: Tensor, root: u32) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::Broadcast {
                tensors: vec![tensor],
                root,
            },
            SubmitOptions::default(),
        )
    }

    /// Reduces to the root.
    fn reduce(&self, tensor: Tensor, op: ReduceOp, root: u32) -> Result<Work, Box<Rejected>> {
        self.run(Collective::Reduce { tensor, op, root }, SubmitOptions::default())
    }

    /// Gathers every rank's input into a list, uneven sizes allowed.
    fn all_gather(&self, input: Tensor, outputs: Vec<Tensor>) -> Result<Work, Box<Rejected>> {
        self.run(Collective::AllGather { input, outputs }, SubmitOptions::default())
    }

    /// Several [`all_gather`](Self::all_gather) as one work: `outputs[r][i]` becomes rank r's `inputs[i]`. The work gives back `inputs[0]`, then
    /// what became of it rank by rank, then `inputs[1]` and so on. All are checked before the first is sent.
    fn all_gather_coalesced(
        &self,
        inputs: Vec<Tensor>,
        outputs: Vec<Vec<Tensor>>,
        options: SubmitOptions,
    ) -> Result<Work, Box<Failed>> {
        let (info, capabilities) = (self.info(), self.capabilities());
        if let Some(odd) = outputs.iter().position(|list| list.len() != inputs.len()) {
            let error = Error::invalid(format!(
                "outputs[{odd}] has {} tensors; there are {} inputs",
                outputs.get(odd).map_or(0, Vec::len),
                inputs.len()
            ));
            let tensors = inputs.into_iter().chain(outputs.into_iter().flatten()).collect();
            let error = error.with_op(OpKind::AllGather.name()).with_rank(info.rank);
            return Err(Box::new(Failed { error, tensors }));
        }
        let mut columns: Vec<_> = outputs.into_iter().map(Vec::into_iter).collect();
        let mut checked = VecDeque::new();
        let mut refused: Option<Error> = None;
        let mut tensors = Vec::new();
        for input in inputs {
            let outputs = columns.iter_mut().filter_map(Iterator::next).collect();
            let op = Collective::AllGather { input, outputs };
            match Checked::new(op, &info, capabilities, &options) {
                Ok(op) => checked.push_back(op),
                Err(rejected) => {
                    tensors.extend(rejected.op.into_tensors());
                    refused.get_or_insert(rejected.error);
                }
            }
        }
        if let Some(error) = refused {
            let rest = checked.into_iter().flat_map(|op| op.into_inner().into_tensors());
            tensors.extend(rest);
            return Err(Box::new(Failed { error, tensors }));
        }
        let (mut works, mut failed) = (Vec::new(), None);
        while let Some(op) = checked.pop_front() {
            match self.submit(op, options.clone()) {
                Ok(work) => works.push(work),
                Err(rejected) => {
                    let mut tensors = rejected.op.into_tensors();
                    let rest = checked.drain(..);
                    tensors.extend(rest.flat_map(|op| op.into_inner().into_tensors()));
                    if works.is_empty() {
                        let error = rejected.error;
                        return Err(Box::new(Failed { error, tensors }));
                    }
                    failed = Some((rejected.error, tensors));
                }
            }
        }
        let deadline = works.iter().map(Work::deadline).max();
        let deadline = deadline.unwrap_or_else(Instant::now);
        Ok(joined(OpKind::AllGather, deadline, works, failed))
    }

    /// Gathers every rank's input into one tensor.
    fn all_gather_into(&self, input: Tensor, output: Tensor) -> Result<Work, Box<Rejected>> {
        self.all_gather_into_coalesced(vec![(input, output)])
    }

    /// Several [`all_gather_into`](Self::all_gather_into) as one operation.
    fn all_gather_into_coalesced(&self, pairs: Vec<(Tensor, Tensor)>) -> Result<Work, Box<Rejected>> {
        self.run(Collective::AllGatherInto { pairs }, SubmitOptions::default())
    }

    /// Gathers in place: what this rank gives is its own part of `tensor`, which has one for each rank and is written but for that one.
    fn all_gather_in_place(&self, tensor: Tensor) -> Result<Work, Box<Rejected>> {
        self.all_gather_in_place_coalesced(vec![tensor])
    }

    /// Several [`all_gather_in_place`](Self::all_gather_in_place) as one operation.
    fn all_gather_in_place_coalesced(&self, tensors: Vec<Tensor>) -> Result<Work, Box<Rejected>> {
        self.run(Collective::AllGatherInPlace { tensors }, SubmitOptions::default())
    }

    /// Gathers to the root.
    fn gather(&self, input: Tensor, outputs: Vec<Tensor>, root: u32) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::Gather { input, outputs, root },
            SubmitOptions::default(),
        )
    }

    /// Scatters from the root.
    fn scatter(&self, inputs: Vec<Tensor>, output: Tensor, root: u32) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::Scatter { inputs, output, root },
            SubmitOptions::default(),
        )
    }

    /// Reduces a list and keeps this rank's part, uneven sizes allowed.
    fn reduce_scatter(
        &self,
        inputs: Vec<Tensor>,
        output: Tensor,
        op: ReduceOp,
    ) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::ReduceScatter { inputs, output, op },
            SubmitOptions::default(),
        )
    }

    /// Reduces one tensor and keeps this rank's part.
    fn reduce_scatter_into(
        &self,
        input: Tensor,
        output: Tensor,
        op: ReduceOp,
    ) -> Result<Work, Box<Rejected>> {
        self.reduce_scatter_into_coalesced(vec![(input, output)], op)
    }

    /// Several [`reduce_scatter_into`](Self::reduce_scatter_into) as one operation.
    fn reduce_scatter_into_coalesced(
        &self,
        pairs: Vec<(Tensor, Tensor)>,
        op: ReduceOp,
    ) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::ReduceScatterInto { pairs, op },
            SubmitOptions::default(),
        )
    }

    /// Reduces in place: this rank's part of `tensor`, which has one for each rank, becomes the reduction of it. What is in the others then
    /// is undefined.
    fn reduce_scatter_in_place(&self, tensor: Tensor, op: ReduceOp) -> Result<Work, Box<Rejected>> {
        self.reduce_scatter_in_place_coalesced(vec![tensor], op)
    }

    /// Several [`reduce_scatter_in_place`](Self::reduce_scatter_in_place) as one operation.
    fn reduce_scatter_in_place_coalesced(
        &self,
        tensors: Vec<Tensor>,
        op: ReduceOp,
    ) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::ReduceScatterInPlace { tensors, op },
            SubmitOptions::default(),
        )
    }

    /// Exchanges lists, uneven sizes allowed.
    fn all_to_all(&self, inputs: Vec<Tensor>, outputs: Vec<Tensor>) -> Result<Work, Box<Rejected>> {
        self.run(Collective::AllToAll { inputs, outputs }, SubmitOptions::default())
    }

    /// Exchanges the parts of one tensor; empty splits mean even ones.
    fn all_to_all_into(
        &self,
        input: Tensor,
        output: Tensor,
        input_splits: Vec<usize>,
        output_splits: Vec<usize>,
    ) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::AllToAllInto {
                input,
                output,
                input_splits,
                output_splits,
            },
            SubmitOptions::default(),
        )
    }

    /// Sends to `peer`.
    fn send(&self, tensor: Tensor, peer: u32, tag: u32) -> Result<Work, Box<Rejected>> {
        self.run(Collective::Send { tensor, peer, tag }, SubmitOptions::default())
    }

    /// Receives from `peer`.
    fn recv(&self, tensor: Tensor, peer: u32, tag: u32) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::Recv {
                tensor,
                peer: Some(peer),
                tag,
            },
            SubmitOptions::default(),
        )
    }

    /// Receives from the first rank that sends with `tag`; the completion names the sender.
    fn recv_any(&self, tensor: Tensor, tag: u32) -> Result<Work, Box<Rejected>> {
        self.run(
            Collective::Recv {
                tensor,
                peer: None,
                tag,
            },
            SubmitOptions::default(),
        )
    }

    /// Sends and receives that progress together.
    fn batch(&self, ops: Vec<Collective>) -> Result<Work, Box<Rejected>> {
        self.run(Collective::Batch { ops }, SubmitOptions::default())
    }

    /// Waits until every rank is here.
    fn barrier(&self) -> Result<()> {
        let result = self.run_blocking(Collective::Barrier, SubmitOptions::default());
        result.map(drop).map_err(Error::from)
    }

    /// As [`barrier`](Self::barrier), naming the missing ranks at the deadline.
    fn monitored_barrier(&self, wait_all: bool, options: SubmitOptions) -> Result<()> {
        let result = self.run_blocking(Collective::MonitoredBarrier { wait_all }, options);
        result.map(drop).map_err(Error::from)
    }

    /// Validates `op` and runs it to its end, blocking; see [`ProcessGroup::execute`].
    fn run_blocking(&self, op: Collective, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        let checked = Checked::new(op, &self.info(), self.capabilities(), &options)?;
        self.execute(checked, options)
    }

    /// All-reduces borrowed memory and blocks until done, at the latest at the group's time-out. Without a copy where the group
    /// advertises [`Feature::Borrow`]; otherwise staged through owned memory. Nothing touches `data` after the return, time-outs
    /// included; after an error its contents are undefined.
    fn all_reduce_slice<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.all_reduce_slice_with(data, op, SubmitOptions::default())
    }

    /// As [`all_reduce_slice`](Self::all_reduce_slice), with a deadline or stream of its own.
    fn all_reduce_slice_with<T: Element>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        options: SubmitOptions,
    ) -> Result<()> {
        self.on_slice(data, options, |tensors| Collective::AllReduce { tensors, op })
    }

    /// Broadcasts the root's memory into borrowed memory, as [`all_reduce_slice`](Self::all_reduce_slice).
    fn broadcast_slice<T: Element>(&self, data: &mut [T], root: u32) -> Result<()> {
        self.broadcast_slice_with(data, root, SubmitOptions::default())
    }

    /// As [`broadcast_slice`](Self::broadcast_slice), with a deadline or stream of its own.
    fn broadcast_slice_with<T: Element>(
        &self,
        data: &mut [T],
        root: u32,
        options: SubmitOptions,
    ) -> Result<()> {
        self.on_slice(data, options, |tensors| Collective::Broadcast { tensors, root })
    }

    /// Runs a collective that works in place on one tensor, over borrowed memory.
    #[doc(hidden)]
    fn on_slice<T: Element>(
        &self,
        data: &mut [T],
        options: SubmitOptions,
        make: impl FnOnce(Vec<Tensor>) -> Collective,
    ) -> Result<()> {
        if self.capabilities().has(Feature::Borrow) {
            return lend(data, |tensor| {
                let result = self.run_blocking(make(vec![tensor]), options);
                result.map(drop).map_err(Error::from)
            });
        }
        let result = self.run_blocking(make(vec![Tensor::from_slice(data)]), options)?;
        data.copy_from_slice(result.into_tensor()?.as_slice()?);
        Ok(())
    }
}

impl<G: ProcessGroup + ?Sized> ProcessGroupExt for G {}
