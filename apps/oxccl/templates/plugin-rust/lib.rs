//! Backend acme: all-reduce of f32 sums on the CPU, through the rendezvous store. Slow and complete: put your library in its place.
//!
//! `cargo test` holds it to the conformance suite.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oxccl_plugin::ftcore::float_mode::DefaultMode;
use oxccl_plugin::ftcore::registry::BackendFactory;
use oxccl_plugin::ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Device, Epoch,
    Error, ErrorKind, Feature, FeatureSet, GroupInfo, GroupOptions, OpKind, OpSet, ProcessGroup,
    ReduceOp, Rejected, Result, Store, SubmitOptions, Tensor, Traffic, Work, deadline_in, names,
    work_pair,
};

/// Makes the groups.
pub struct Factory;

/// Whatever stands here, the suite tests.
fn capabilities() -> Capabilities {
    let f32s = DTypeSet::of(&[DType::F32]);
    let mut reduces = [DTypeSet::NONE; ReduceOp::COUNT];
    if let Some(sum) = reduces.get_mut(usize::from(ReduceOp::Sum.code())) {
        *sum = f32s;
    }
    Capabilities {
        ops: OpSet::of(&[OpKind::AllReduce]),
        moves: f32s,
        reduces,
        features: FeatureSet::of(&[Feature::BitwiseEqual, Feature::ThreadRanks]),
        options: Vec::new(),
        devices: names(&["cpu"]),
        notes: Vec::new(),
    }
}

impl BackendFactory for Factory {
    // Cheap, and the place to say what is missing: a library, a device, a licence.
    fn probe(&self) -> Result<()> {
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        capabilities()
    }

    fn create(&self, _device: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        options.require_honoured("acme", &[])?;
        Ok(Box::new(Group {
            capabilities: capabilities(),
            timeout: options.timeout,
            state: Mutex::default(),
        }))
    }
}

struct Group {
    capabilities: Capabilities,
    timeout: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    configured: Option<Configuration>,
    /// Operations so far.
    seq: u64,
    traffic: Traffic,
    /// Refuses calls until the next `configure`: the ranks may not be at the same operation any more.
    failure: Option<Error>,
}

/// What `rank` wrote under `key`; a rank that does not come is named.
fn read_part(
    store: &dyn Store,
    c: &Configuration,
    phase: &str,
    key: &str,
    rank: u32,
    deadline: Instant,
) -> Result<Vec<u8>> {
    store
        .get(&format!("{key}/{rank}"), deadline)
        .map_err(|e| match e.kind() {
            ErrorKind::Timeout => {
                let text = format!(
                    "waiting for rank {rank} of {} in phase {phase}",
                    c.world_size
                );
                Error::timeout(text).with_peer(rank)
            }
            // A cancelled `configure`, a store that is gone: said well already.
            _ => e,
        })
}

/// Each rank writes a part and reads all parts in the order of ranks: all compute the same bytes. The keys stay until the store ends.
fn all_reduce(state: &mut State, tensors: &mut [Tensor], deadline: Instant) -> Result<()> {
    let Some(c) = &state.configured else {
        return Err(Error::new(ErrorKind::InvalidState, "not configured"));
    };
    for (t, tensor) in tensors.iter_mut().enumerate() {
        let key = format!("{}/acme/{}/{}/{t}", c.prefix, c.epoch, state.seq);
        c.store
            .set(&format!("{key}/{}", c.rank), tensor.bytes(), deadline)?;
        let mut sums = vec![0f32; tensor.count()];
        for rank in 0..c.world_size {
            let part = read_part(&*c.store, c, "part", &key, rank, deadline)?;
            if part.len() != tensor.byte_len() {
                let text = format!(
                    "rank {rank} has {} bytes, this rank {}",
                    part.len(),
                    tensor.byte_len()
                );
                return Err(Error::new(ErrorKind::Mismatch, text));
            }
            // A program may have set how this thread flushes and rounds; the sum is the same on all ranks.
            let _mode = DefaultMode::set();
            add(&mut sums, &part);
            if rank != c.rank {
                state.traffic.sent += tensor.byte_len() as u64;
                state.traffic.received += part.len() as u64;
            }
        }
        tensor.as_mut_slice()?.copy_from_slice(&sums);
    }
    state.seq += 1;
    Ok(())
}

/// Not inlined: see `DefaultMode`.
#[inline(never)]
fn add(sums: &mut [f32], part: &[u8]) {
    for (sum, bytes) in sums.iter_mut().zip(part.as_chunks::<4>().0) {
        *sum += f32::from_ne_bytes(*bytes);
    }
}

impl Group {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessGroup for Group {
    fn info(&self) -> GroupInfo {
        let state = self.state();
        let c = state.configured.as_ref();
        GroupInfo {
            backend: "acme".into(),
            name: c.map_or("acme", |c| &c.name).into(),
            rank: c.map_or(0, |c| c.rank),
            world_size: c.map_or(0, |c| c.world_size),
            epoch: c.map_or(Epoch(0), |c| c.epoch),
            device: Device::CPU,
            dropped_options: Vec::new(),
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    // All ranks meet, so that one that is missing is found now. A real backend exchanges its addresses here.
    fn configure(&self, c: Configuration) -> Result<()> {
        let mut state = self.state();
        *state = State {
            traffic: state.traffic,
            ..State::default()
        };
        // Waits end as soon as the configuration is not wanted any more.
        let store = c.cancel.over(&c.store);
        let key = format!("{}/acme/{}/meet", c.prefix, c.epoch);
        store.set(&format!("{key}/{}", c.rank), b"here", c.deadline)?;
        for rank in 0..c.world_size {
            read_part(&*store, &c, "meet", &key, rank, c.deadline)?;
        }
        state.configured = Some(c);
        Ok(())
    }

    // What comes here was checked against the capabilities. A real backend hands it to a thread or a device, and can be aborted then; this one is
    // done when it returns.
    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let deadline = options
            .deadline
            .unwrap_or_else(|| deadline_in(self.timeout));
        let mut state = self.state();
        let op = op.into_inner();
        if state.configured.is_none() {
            let error = Error::new(ErrorKind::InvalidState, "the group is not configured");
            return Err(Box::new(Rejected { error, op }));
        }
        if let Some(first) = &state.failure {
            let error = Error::new(
                ErrorKind::Poisoned,
                format!("the group failed earlier: {first}"),
            );
            return Err(Box::new(Rejected { error, op }));
        }
        let mut tensors = match op {
            Collective::AllReduce { tensors, .. } => tensors,
            op => {
                return Err(Box::new(Rejected {
                    error: Error::unsupported("acme does sums"),
                    op,
                }));
            }
        };
        let (work, completer) = work_pair(OpKind::AllReduce, deadline, |_| {});
        match all_reduce(&mut state, &mut tensors, deadline) {
            Ok(()) => completer.succeed(Completion {
                tensors,
                source: None,
                contributors: 0,
            }),
            Err(error) => {
                state.failure = Some(error.clone());
                completer.fail(error, tensors);
            }
        }
        Ok(work)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Err(Error::unsupported("acme groups cannot be split"))
    }

    // Nothing is pending between calls. A backend that advertises Feature::Abort ends its pending operations here.
    fn abort(&self, _reason: &str) {}

    fn error(&self) -> Option<Error> {
        self.state().failure.clone()
    }

    fn shutdown(&self, _deadline: Instant) -> Result<()> {
        self.state().configured = None;
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        self.state().traffic
    }
}

oxccl_plugin::export! {
    name: "acme",
    version: env!("CARGO_PKG_VERSION"),
    backends: [("acme", "cpu", || Arc::new(Factory))],
}
