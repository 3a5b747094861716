//! A member of a fixed world for tests of error feedback, here and in `ddp`: its quorums and votes are scripted, its reductions are real.

#![allow(dead_code, reason = "each test takes what it needs")]

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use checkpoint::StateDict;
use ftcore::{
    Collective, Configuration, Epoch, Error, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Result,
    Store, SubmitOptions, Tensor, Traffic, deadline_in,
};
use manager::{Healed, ManagedWork, Participation, Replica, State};
use quant::{Codec, QuantizeOptions, QuantizedGroup};

/// See the module.
pub(crate) struct Member {
    pub(crate) group: Arc<QuantizedGroup>,
    rank: u32,
    world: u32,
    pub(crate) step: i64,
    contributes: bool,
    error: Option<Error>,
    /// One per vote; yes when there are no more.
    pub(crate) votes: VecDeque<bool>,
    /// Who waits for this rank's state at its next quorum.
    pub(crate) offer: Mutex<Option<Sender<(i64, StateDict)>>>,
    /// Where the state to heal from comes from.
    pub(crate) heal: Option<Receiver<(i64, StateDict)>>,
    /// What was owed right after healing.
    pub(crate) adopted: Vec<(String, Vec<f32>)>,
}

impl Member {
    /// Rank `place.0` of `place.1` over a group of two bits with error feedback, configured at `epoch`.
    pub(crate) fn new(epoch: u64, store: &Arc<dyn Store>, place: (u32, u32)) -> Self {
        let options = QuantizeOptions {
            codec: Codec::Int2B64.into(),
            error_feedback: true,
            timeout: Duration::from_secs(60),
            ..QuantizeOptions::default()
        };
        let gloo = Arc::new(GlooGroup::new("d", GroupOptions::default()).unwrap());
        let group = Arc::new(QuantizedGroup::with_options(gloo, options).unwrap());
        let (rank, world) = place;
        group.configure(configuration(epoch, store, place)).unwrap();
        Self {
            group,
            rank,
            world,
            step: 0,
            contributes: true,
            error: None,
            votes: VecDeque::new(),
            offer: Mutex::new(None),
            heal: None,
            adopted: Vec::new(),
        }
    }
}

impl Replica for Member {
    fn start_quorum(&mut self, state: &mut dyn State, _: Instant) -> Result<Participation> {
        self.error = None;
        let healed = self.heal.take();
        let healed = healed.map(|source| source.recv_timeout(Duration::from_secs(60)).unwrap());
        self.contributes = healed.is_none();
        if let Some((step, dict)) = &healed {
            state.load(dict)?;
            self.step = *step;
            self.adopted = self.group.error_feedback().unwrap().state();
        }
        if let Some(waiting) = self.offer.lock().unwrap().take() {
            let mut snapshot = StateDict::new();
            state.save(&mut snapshot)?;
            waiting.send((self.step, snapshot)).unwrap();
        }
        Ok(Participation {
            epoch: 1,
            step: self.step,
            replica_rank: self.rank,
            replica_world_size: self.world,
            contributes: self.contributes,
            healed: healed.map(|_| Healed {
                source: Some(0),
                bytes: 1,
                took: Duration::ZERO,
            }),
            members: (0..self.world).map(|r| r.to_string()).collect(),
        })
    }

    fn allreduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        let options = SubmitOptions {
            contribute: self.contributes,
            ..SubmitOptions::by(soon())
        };
        let work = self.group.run(Collective::AllReduce { tensors, op }, options);
        ManagedWork::submitted(work.map_err(Error::from).unwrap())
    }

    fn should_commit(&mut self, _: Instant) -> Result<bool> {
        let yes = self.error.is_none() && self.votes.pop_front().unwrap_or(true);
        self.step += i64::from(yes);
        Ok(yes)
    }

    fn current_step(&self) -> i64 {
        self.step
    }
    fn report_error(&mut self, error: Error) {
        self.error = Some(error);
    }
    fn error(&self) -> Option<Error> {
        self.error.clone()
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    fn leave(&mut self, _: Instant) -> Result<()> {
        Ok(())
    }
}

pub(crate) fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

pub(crate) fn configuration(epoch: u64, store: &Arc<dyn Store>, (rank, world): (u32, u32)) -> Configuration {
    Configuration {
        store: store.clone(),
        prefix: "t".to_string(),
        name: "d".to_string(),
        epoch: Epoch(epoch),
        rank,
        world_size: world,
        deadline: soon(),
    }
}
