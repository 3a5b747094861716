//! What both training programs do as a replica: take their place in the job, build the manager, report commits.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use ftcore::{Device, Epoch, Error, ErrorKind, Result, Step, Traffic};
use manager::{Healed, Manager, ManagerConfig};
use oxccl::launch::{Commit, EventKind, EventSender, Final, ReplicaEnv, ReplicaState};
use quant::{ErrorFeedback, QuantizedGroup};

use crate::chaos::HoldGroup;
use crate::device;
use crate::drive::NetArgs;
use crate::ranks::{InStep, Ranks};
use crate::resume::{CheckpointArgs, Checkpoints};

/// How long the end of a run waits for its supervisor to take the report: one that was stopped, or has no core, is no reason to
/// have trained in vain.
const REPORT: Duration = Duration::from_secs(60);

/// A replica's place, its events and its clock.
pub struct Place {
    /// Index, number of replicas, incarnation, rank, lighthouse.
    pub env: ReplicaEnv,
    /// The ranks of this replica.
    pub ranks: Arc<Ranks>,
    /// Where events go.
    pub events: EventSender,
    /// The step being worked on, for the chaos wrapper.
    pub step: Arc<AtomicI64>,
    /// What this replica's quantised group owes, if it feeds errors back.
    pub residuals: Option<Arc<ErrorFeedback>>,
    /// Where the state goes to disk, if it does.
    pub checkpoints: Option<Checkpoints>,
    device: Device,
    epoch: Epoch,
    inner: Duration,
    inner_steps: u64,
}

/// What the two kinds of reports of a committed step have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed<'a> {
    step: Step,
    epoch: Epoch,
    members: usize,
    contributors: u32,
    failed_attempts: u32,
    healed: Option<&'a Healed>,
}

/// Takes the fields that both have by their names.
macro_rules! committed {
    ($($report:ty),+) => {$(
        impl<'a> From<&'a $report> for Committed<'a> {
            fn from(report: &'a $report) -> Self {
                Self {
                    step: report.step,
                    epoch: report.epoch,
                    members: report.members,
                    contributors: report.contributors,
                    failed_attempts: report.failed_attempts,
                    healed: report.healed.as_ref(),
                }
            }
        }
    )+};
}

committed!(ddp::StepReport, diloco::RoundReport);

impl Place {
    /// Reads the environment that the launcher sets, checks that there is one compute thread, and meets the other ranks of this replica over
    /// the backend of `net`.
    pub fn take(net: &NetArgs) -> Result<Self> {
        let env = ReplicaEnv::from_env()?;
        oxccl_candle::require_one_compute_thread()?;
        let device = device::of_replica(&net.device, env.replica * env.ranks + env.rank)?;
        let ranks = Ranks::meet(&env, net.backend.as_deref(), &device, &net.group_options()?)?;
        Ok(Self {
            env,
            ranks,
            device,
            events: EventSender::from_env(),
            step: Arc::new(AtomicI64::new(-1)),
            residuals: None,
            checkpoints: None,
            epoch: Epoch(0),
            inner: Duration::ZERO,
            inner_steps: 0,
        })
    }

    /// Opens the checkpoints, if there are to be any, and joins the lighthouse over the backend, the format and the addresses of
    /// `net`. `run` are the options that a checkpoint must have been written with, `steps` those of the run.
    pub fn manager(
        &mut self,
        net: &NetArgs,
        checkpoints: &CheckpointArgs,
        run: &str,
        steps: i64,
    ) -> Result<InStep<Manager>> {
        self.checkpoints = Checkpoints::open(checkpoints, &self.env, &self.events, run, steps)?;
        let name = format!("replica{}", self.env.replica);
        let options = net.group_options()?;
        let mut group = device::group(net.backend.as_deref(), &self.device, &options)?;
        if let Some(quantisation) = net.quantisation(options.timeout) {
            let quantized = QuantizedGroup::with_options(group, quantisation)?;
            self.residuals = quantized.error_feedback();
            group = Arc::new(quantized);
        }
        let group = Arc::new(HoldGroup::from_env(
            group,
            (self.env.replica, self.env.rank),
            self.events.clone(),
            self.step.clone(),
        )?);
        let mut config = ManagerConfig::new(name, &self.env.lighthouse);
        config.connect_timeout = Duration::from_secs(10);
        config.bind.clone_from(&net.bind);
        config.advertise_host.clone_from(&net.advertise);
        config.heal_over = net.heal_over;
        config.timeout = net.timeout();
        config.progress_timeout = net.progress_timeout();
        (config.group_rank, config.group_world_size) = (self.env.rank, self.env.ranks);
        config.replica_store = self.ranks.store();
        let mut manager = Manager::new(group, config)?;
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.restore(&mut manager)?;
        }
        let replica_id = manager.replica_id().to_string();
        self.events.send(EventKind::Started {
            pid: std::process::id(),
            replica_id,
        });
        self.events.send(EventKind::State {
            state: ReplicaState::Joining,
        });
        Ok(InStep::new(manager, self.ranks.clone()))
    }

    /// What a training loop calls with step and epoch whenever a reduction has been handed to the group.
    pub fn reduce_begun(&self) -> impl FnMut(Step, Epoch) + Send + use<> {
        let events = self.events.clone();
        move |step, epoch| {
            let (step, epoch) = (u64::try_from(step.0).unwrap_or(0), epoch.0);
            events.send(EventKind::ReduceBegin { step, epoch });
        }
    }

    /// Counts one inner step, which took so long.
    pub fn inner_step(&mut self, took: Duration, inner_step: u64, loss: f32, samples: usize) {
        self.inner += took;
        self.inner_steps += 1;
        if !self.ranks.is_first() {
            // The loss is that of the replica's whole batch, and one curve of it is enough.
            return;
        }
        let tokens_per_s = samples as f64 * self.ranks.size() as f64 / took.as_secs_f64().max(1e-9);
        self.events.send(EventKind::Step {
            inner_step,
            loss: f64::from(loss),
            tokens_per_s,
        });
    }

    /// Reports a committed step; without `hash` if the parameters that it ended with are no longer here.
    ///
    /// Errors: `InvalidState` if this is a restarted incarnation that began from nothing, alone, or one with damaged checkpoints only:
    /// training on would silently be another run.
    pub fn committed(
        &mut self,
        committed: Committed<'_>,
        sync: Duration,
        hash: Option<String>,
        traffic: Traffic,
    ) -> Result<()> {
        let Committed {
            step, epoch, members, ..
        } = committed;
        if self.env.incarnation > 0 && step == Step(0) && members < 2 && self.env.replicas > 1 {
            return Err(Error::new(
                ErrorKind::InvalidState,
                format!(
                    "incarnation {} of replica {} found no replica to heal from: the run is over, or its state is lost. Start a new run",
                    self.env.incarnation, self.env.replica
                ),
            ));
        }
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.check_start(step)?;
        }
        let step = u64::try_from(step.0).unwrap_or(0);
        let participants = u32::try_from(members).unwrap_or(u32::MAX);
        if epoch != self.epoch {
            self.epoch = epoch;
            self.events.send(EventKind::Quorum {
                epoch: epoch.0,
                step,
                size: participants,
            });
        }
        if let Some(healed) = committed.healed {
            let (bytes, ms) = (healed.bytes as u64, healed.took.as_secs_f64() * 1e3);
            self.events.send(EventKind::Healed { step, bytes, ms });
        }
        self.events.send(EventKind::Commit(Commit {
            step,
            epoch: epoch.0,
            failed_attempts: committed.failed_attempts,
            participants,
            contributors: committed.contributors,
            hash,
            inner_ms: std::mem::take(&mut self.inner).as_secs_f64() * 1e3,
            sync_ms: sync.as_secs_f64() * 1e3,
            bytes_sent: traffic.sent,
            bytes_recv: traffic.received,
        }));
        self.events.send(EventKind::State {
            state: ReplicaState::Training,
        });
        Ok(())
    }

    /// Reports the end, which is that of the run unless the replica was drained, and waits until the report is out, and the last
    /// checkpoint on disk.
    pub fn finished(
        &self,
        state: ReplicaState,
        step: Step,
        hash: String,
        held_out: (f32, Option<f32>),
        train_loss: f32,
        traffic: Traffic,
    ) -> Result<()> {
        self.events.send(EventKind::Final(Final {
            step: u64::try_from(step.0).unwrap_or(0),
            hash,
            heldout_loss: f64::from(held_out.0),
            heldout_accuracy: held_out.1.map(f64::from),
            train_loss: f64::from(train_loss),
            inner_steps: self.inner_steps,
            bytes_sent: traffic.sent,
            bytes_recv: traffic.received,
            state,
        }));
        self.events.send(EventKind::State { state });
        if state == ReplicaState::Drained {
            let index = self.env.replica;
            // Standard error may be a pipe that is not read any more.
            let _ = writeln!(
                std::io::stderr(),
                "replica {index} was drained: it left in good order after {step} steps, and the others go on"
            );
        }
        if let Some(checkpoints) = &self.checkpoints {
            checkpoints.flush();
        }
        self.events.flush(ftcore::deadline_in(REPORT))
    }
}

/// A running mean of the last losses, so that one batch does not stand for the end of a run.
#[derive(Debug, Default)]
pub struct RecentLoss(std::collections::VecDeque<f32>);

impl RecentLoss {
    /// Adds one; the last 20 count.
    pub fn push(&mut self, loss: f32) {
        self.0.push_back(loss);
        if self.0.len() > 20 {
            self.0.pop_front();
        }
    }

    /// The losses that count, the oldest first.
    pub fn values(&self) -> Vec<f32> {
        self.0.iter().copied().collect()
    }

    /// Goes on from `values`.
    pub fn load(&mut self, values: &[f32]) {
        self.0.clear();
        values.iter().for_each(|v| self.push(*v));
    }

    /// Their mean; NaN without any.
    pub fn mean(&self) -> f32 {
        self.0.iter().sum::<f32>() / self.0.len() as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_reports_tell_of_attempts_that_failed() {
        let step = ddp::StepReport {
            step: Step(3),
            epoch: Epoch(2),
            members: 2,
            contributors: 1,
            failed_attempts: 2,
            healed: None,
            reducing: Duration::ZERO,
            waited: Duration::ZERO,
        };
        let round = diloco::RoundReport {
            step: Step(3),
            epoch: Epoch(2),
            members: 2,
            contributors: 1,
            failed_attempts: 2,
            healed: None,
            sync: Duration::ZERO,
            superseded: false,
        };
        for committed in [Committed::from(&step), Committed::from(&round)] {
            assert_eq!(committed.failed_attempts, 2, "{committed:?}");
        }
    }
}
