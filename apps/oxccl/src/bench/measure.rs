//! One rank's side of a benchmark: it joins the group, measures line by line, and puts its times into the store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oxccl::core::{
    Accelerator, Cancel, Collective, Configuration, Device, Epoch, Error, ErrorKind, OpKind, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, Store, Stream, SubmitOptions, Tensor, accelerator, deadline_in,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use super::pattern::Pattern;
use super::plan::{Op, Plan, Row};

/// How long the ranks may take to meet, and to part.
pub(super) const MEET: Duration = Duration::from_secs(60);

/// What one rank measured for one line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Times {
    /// Nanoseconds of each iteration, in order.
    pub(super) ns: Vec<u64>,
    /// Elements that were not what they must be; 0 without a check.
    pub(super) wrong: u64,
    /// How the ranks were connected, where the backend says so.
    #[serde(default)]
    pub(super) transport: Option<String>,
}

/// Where a rank puts what it measured for line `row`.
pub(super) fn key(row: usize, rank: u32) -> String {
    format!("bench/row/{row}/{rank}")
}

/// Carries out `plan` as `rank`: one entry in the store per line, in order.
pub(super) fn run(
    plan: &Plan,
    group: &dyn ProcessGroup,
    store: &Arc<dyn Store>,
    rank: u32,
    cancel: Cancel,
) -> Result<()> {
    if plan.bind {
        bind(rank)?;
    }
    group.configure(Configuration {
        store: store.clone(),
        prefix: "bench/group".to_string(),
        name: "bench".to_string(),
        epoch: Epoch(1),
        rank,
        world_size: plan.ranks,
        deadline: deadline_in(MEET),
        cancel,
    })?;
    let is = group.info();
    if (is.rank, is.world_size) != (rank, plan.ranks) {
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "backend '{}' was configured as rank {rank} of {} and says that it is rank {} of {}",
                plan.backend, plan.ranks, is.rank, is.world_size
            ),
        ));
    }
    let device = plan.device(rank)?;
    let memory = match device.is_cpu() {
        true => None,
        false => Some(Memory::new(device)?),
    };
    let mut gates = 0;
    for (index, row) in plan.rows()?.into_iter().enumerate() {
        let deadline = plan.row_deadline();
        let mut runner = Runner {
            plan,
            group,
            memory: memory.as_ref(),
            store: store.as_ref(),
            rank,
            deadline,
            gates,
        };
        let times = runner.measure(row)?;
        gates = runner.gates;
        let text = serde_json::to_vec(&times)
            .map_err(|e| Error::invalid(format!("write what rank {rank} measured: {e}")))?;
        // The limit is on the measured calls; a line that just made it is told.
        store.set(&key(index, rank), &text, deadline_in(MEET))?;
    }
    // No rank leaves while another may still be in the last operation.
    store.barrier("bench/end", plan.ranks, deadline_in(MEET))?;
    group.shutdown(deadline_in(MEET))
}

/// Binds this thread, and those that it starts, to one of the cores that it may use.
fn bind(rank: u32) -> Result<()> {
    let failed = |e: rustix::io::Errno| Error::io(format!("bind rank {rank} to a core"), e.into());
    let may = sched_getaffinity(None).map_err(failed)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| may.is_set(core)).collect();
    let mut one = CpuSet::new();
    if let Some(&core) = cores.get(rank as usize % cores.len().max(1)) {
        one.set(core);
        sched_setaffinity(None, &one).map_err(failed)?;
    }
    Ok(())
}

/// The memory of a device and the stream of the copies to and from it.
struct Memory {
    device: Device,
    accelerator: Arc<dyn Accelerator>,
    stream: Arc<dyn Stream>,
}

impl Memory {
    fn new(device: Device) -> Result<Self> {
        let accelerator = accelerator(&device.kind)?;
        let stream = accelerator.new_stream(device.index, false)?;
        Ok(Self {
            device,
            accelerator,
            stream,
        })
    }
}

/// One rank in one line.
struct Runner<'a> {
    plan: &'a Plan,
    group: &'a dyn ProcessGroup,
    /// The device's memory; host memory without.
    memory: Option<&'a Memory>,
    store: &'a dyn Store,
    rank: u32,
    deadline: Instant,
    /// Barriers through the store so far; each needs a key of its own.
    gates: u64,
}

impl Runner<'_> {
    fn measure(&mut self, row: Row) -> Result<Times> {
        let mut wrong = 0;
        let mut tensors = self.tensors(row)?;
        if self.plan.check {
            (tensors, wrong) = self.check(row, tensors, 1)?;
        }
        // Written, so that no page is still missing; and zeros, so that sums of sums stay zeros.
        for tensor in &mut tensors {
            self.set(tensor, |t| t.bytes_mut().fill(0))?;
        }
        for _ in 0..self.plan.warm_ups(row) {
            (tensors, _) = self.once(row, tensors)?;
        }
        let mut ns = Vec::new();
        for _ in 0..self.plan.iters {
            let time;
            (tensors, time) = self.once(row, tensors)?;
            ns.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        }
        if self.plan.check {
            wrong += self.check(row, tensors, 2)?.1;
        }
        let notes = &self.group.capabilities().notes;
        let transport = notes.iter().find(|(what, _)| what == "transport");
        let transport = transport.map(|(_, how)| how.to_string());
        Ok(Times { ns, wrong, transport })
    }

    /// The tensors of a call, in the order of `Collective::tensors`: an input, and an output where it is another one.
    fn tensors(&self, row: Row) -> Result<Vec<Tensor>> {
        let dtype = self.plan.dtype()?;
        let part = row.count / (self.plan.ranks as usize).max(1);
        let counts: &[usize] = match row.op {
            Op::AllReduce | Op::Broadcast | Op::Reduce => &[row.count],
            Op::AllGatherInto => &[part, row.count],
            Op::ReduceScatterInto => &[row.count, part],
            Op::AllToAllInto | Op::SendRecv => &[row.count, row.count],
            // Rank 0 gets it back in another tensor, rank 1 returns the one that it gets, others have none.
            Op::PingPong => match self.rank {
                0 => &[row.count, row.count],
                1 => &[row.count],
                _ => &[],
            },
            Op::Barrier => &[],
        };
        let make = |&count: &usize| match self.memory {
            Some(memory) => memory.accelerator.alloc(memory.device.index, dtype, &[count]),
            None if self.plan.alloc => self.group.alloc(dtype, count),
            None => Ok(Tensor::zeros(dtype, count)),
        };
        counts.iter().map(make).collect()
    }

    /// Writes a tensor through its bytes on the host.
    fn set(&self, tensor: &mut Tensor, write: impl FnOnce(&mut Tensor)) -> Result<()> {
        let Some(memory) = self.memory else {
            write(tensor);
            return Ok(());
        };
        let mut host = Tensor::zeros(tensor.dtype(), tensor.count());
        write(&mut host);
        memory
            .accelerator
            .copy_in(host.bytes(), tensor, &*memory.stream)?;
        memory.stream.synchronize(self.deadline)
    }

    /// The elements that are not what they must be.
    fn count_wrong(&self, pattern: &Pattern, op: Op, output: &Tensor) -> Result<u64> {
        let Some(memory) = self.memory else {
            return pattern.count_wrong(op, output);
        };
        let mut host = Tensor::zeros(output.dtype(), output.count());
        memory
            .accelerator
            .copy_out(output, host.bytes_mut(), &*memory.stream)?;
        pattern.count_wrong(op, &host)
    }

    /// Runs once with known data and counts the wrong elements of the result.
    fn check(&mut self, row: Row, mut tensors: Vec<Tensor>, round: u64) -> Result<(Vec<Tensor>, u64)> {
        let pattern = Pattern::new(self.plan.dtype()?, row, self.rank, self.plan.ranks, round);
        if let Some((input, outputs)) = tensors.split_first_mut() {
            self.set(input, |t| pattern.fill(t))?;
            for output in outputs {
                // No element of the pattern looks like this.
                self.set(output, |t| t.bytes_mut().fill(0xA5))?;
            }
        }
        let (tensors, _) = self.once(row, tensors)?;
        let wrong = match tensors.last() {
            Some(output) => self.count_wrong(&pattern, row.op, output)?,
            None => 0,
        };
        Ok((tensors, wrong))
    }

    /// One call, begun together with the other ranks: from the call to the result in this rank's hands.
    fn once(&mut self, row: Row, tensors: Vec<Tensor>) -> Result<(Vec<Tensor>, Duration)> {
        if row.op == Op::PingPong {
            self.gate()?;
            let start = Instant::now();
            let tensors = self.ping_pong(tensors)?;
            return Ok((tensors, start.elapsed()));
        }
        let call = self.call(row.op, tensors)?;
        self.gate()?;
        let start = Instant::now();
        let tensors = self.end(call)?;
        Ok((tensors, start.elapsed()))
    }

    /// Runs `call` to its end, blocking or submitted.
    fn end(&self, call: Collective) -> Result<Vec<Tensor>> {
        let options = SubmitOptions::by(self.deadline);
        let completion = if self.plan.submit {
            self.group.run(call, options)?.take()?
        } else {
            self.group.run_blocking(call, options)?
        };
        Ok(completion.tensors)
    }

    /// A message from rank 0 to rank 1 and back.
    fn ping_pong(&self, tensors: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let send = |tensor, peer| self.end(Collective::Send { tensor, peer, tag: 0 });
        let receive = |tensor, peer| {
            self.end(Collective::Recv {
                tensor,
                peer: Some(peer),
                tag: 0,
            })
        };
        let mut back = Vec::new();
        for (n, tensor) in tensors.into_iter().enumerate() {
            match (self.rank, n) {
                (0, 0) => back.extend(send(tensor, 1)?),
                (0, _) => back.extend(receive(tensor, 1)?),
                _ => {
                    for tensor in receive(tensor, 0)? {
                        back.extend(send(tensor, 0)?);
                    }
                }
            }
        }
        Ok(back)
    }

    /// Returns once every rank is here.
    fn gate(&mut self) -> Result<()> {
        if self.group.capabilities().ops.contains(OpKind::Barrier) {
            let options = SubmitOptions::by(self.deadline);
            self.group.run_blocking(Collective::Barrier, options)?;
            return Ok(());
        }
        self.gates += 1;
        let key = format!("bench/gate/{}", self.gates);
        self.store.barrier(&key, self.plan.ranks, self.deadline)
    }

    fn call(&self, op: Op, tensors: Vec<Tensor>) -> Result<Collective> {
        let sum = ReduceOp::Sum;
        let mut tensors = tensors.into_iter();
        let mut next = || {
            tensors
                .next()
                .ok_or_else(|| Error::invalid("a tensor of the call was not given back").with_op(op.name()))
        };
        Ok(match op {
            Op::AllReduce => Collective::AllReduce {
                tensors: vec![next()?],
                op: sum,
            },
            Op::Broadcast => Collective::Broadcast {
                tensors: vec![next()?],
                root: 0,
            },
            Op::Reduce => Collective::Reduce {
                tensor: next()?,
                op: sum,
                root: 0,
            },
            Op::AllGatherInto => Collective::AllGatherInto {
                pairs: vec![(next()?, next()?)],
            },
            Op::ReduceScatterInto => Collective::ReduceScatterInto {
                pairs: vec![(next()?, next()?)],
                op: sum,
            },
            Op::AllToAllInto => Collective::AllToAllInto {
                input: next()?,
                output: next()?,
                input_splits: Vec::new(),
                output_splits: Vec::new(),
            },
            Op::SendRecv => {
                let ranks = self.plan.ranks;
                let send = Collective::Send {
                    tensor: next()?,
                    peer: (self.rank + 1) % ranks,
                    tag: 0,
                };
                let recv = Collective::Recv {
                    tensor: next()?,
                    peer: Some((self.rank + ranks - 1) % ranks),
                    tag: 0,
                };
                Collective::Batch {
                    ops: vec![send, recv],
                }
            }
            Op::Barrier => Collective::Barrier,
            Op::PingPong => {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "ping_pong is two calls, one after the other",
                ));
            }
        })
    }
}
