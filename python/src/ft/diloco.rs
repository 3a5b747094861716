//! LocalSGD, DiLoCo and Streaming DiLoCo over a replica, on parameters that Python lends.

use std::sync::{Arc, Mutex, MutexGuard};

use oxccl::core::{Error, ErrorKind, Result};
use oxccl::diloco::{Diloco, DilocoConfig, FragmentPlan, OuterOptimizer, RoundReport, TensorParameters};
use oxccl::manager::{Lineage, Replica, State};
use pyo3::prelude::*;

use super::checkpoints::PyCheckpoints;
use super::replica::{Core, PyReplica, Shared};
use super::states;
use crate::errors::Raise;
use crate::interrupt::apart;
use crate::lend::{Access, list};
use crate::options;
use crate::process::detached;
use crate::quantized::QuantizedGroup;

type Run = Diloco<Shared, TensorParameters>;

/// The batches that led to a saved state, in its metadata.
const BATCHES: &str = "python.batches";

/// What a finished round was like.
#[pyclass(frozen, get_all, module = "oxccl._oxccl")]
pub(crate) struct Round {
    step: i64,
    epoch: i64,
    members: usize,
    contributors: u32,
    failed_attempts: u32,
    healed: bool,
    sync_seconds: f64,
}

impl From<RoundReport> for Round {
    fn from(r: RoundReport) -> Self {
        Self {
            step: r.step.0,
            epoch: r.epoch.signed(),
            members: r.members,
            contributors: r.contributors,
            failed_attempts: r.failed_attempts,
            healed: r.healed.is_some(),
            sync_seconds: r.sync.as_secs_f64(),
        }
    }
}

#[pymethods]
impl Round {
    fn __repr__(&self) -> String {
        format!(
            "Round(step {}, {} of {} contributed, {} failed attempts)",
            self.step, self.contributors, self.members, self.failed_attempts
        )
    }
}

/// A run of DiLoCo. The parameters are memory that the caller trains in between the calls.
#[pyclass(frozen, weakref, module = "oxccl._oxccl", name = "_Diloco")]
pub(crate) struct PyDiloco {
    run: Arc<Mutex<Run>>,
    core: Arc<Core>,
}

fn outer(kind: &str, lr: f32, momentum: f32) -> Result<OuterOptimizer> {
    match kind {
        "sgd" => Ok(OuterOptimizer::Sgd { lr }),
        "nesterov" => Ok(OuterOptimizer::Nesterov { lr, momentum }),
        "adamw" => Ok(OuterOptimizer::AdamW { lr }),
        _ => Err(Error::invalid(format!(
            "the outer optimizer is '{kind}', not 'sgd', 'nesterov' or 'adamw'"
        ))),
    }
}

/// The run, if no other call has it: one that was interrupted goes on, and one that asks for the state waits for the caller's own code.
fn free(run: &Mutex<Run>) -> Result<MutexGuard<'_, Run>> {
    run.try_lock().map_err(|_| {
        let text = "another call of this run is still under way: one thread drives it, and a call that was interrupted goes on for a while";
        Error::new(ErrorKind::InvalidState, text)
    })
}

impl PyDiloco {
    fn rounds(
        &self,
        py: Python<'_>,
        states: &Bound<'_, PyAny>,
        call: impl FnOnce(&mut Run, &mut dyn State) -> Result<Vec<RoundReport>> + Send + 'static,
    ) -> PyResult<Vec<Round>> {
        let reports = self.call(py, states, call)?;
        Ok(reports.into_iter().map(Round::from).collect())
    }

    /// A call of the run that asks for the state, or hands one over.
    fn call<T: Send + 'static>(
        &self,
        py: Python<'_>,
        states: &Bound<'_, PyAny>,
        call: impl FnOnce(&mut Run, &mut dyn State) -> Result<T> + Send + 'static,
    ) -> PyResult<T> {
        self.core.is_at_home().or_raise(py)?;
        let run = self.run.clone();
        let call = move |state: &mut dyn State| call(&mut *free(&run)?, state);
        let found = states::run(py, states, || self.core.interrupt(), call)?;
        self.core.configured();
        Ok(found)
    }
}

#[pymethods]
impl PyDiloco {
    #[new]
    #[pyo3(signature = (replica, names, tensors, fragments, *, sync_every, delay=0, mixing=0.0, eager=false, outer=(String::from("nesterov"), 0.7, 0.9),
        bucket_elements=1 << 18, rounds=None, round_timeout=600.0, feedback=None))]
    #[allow(clippy::too_many_arguments, reason = "each has a name in Python")]
    fn new(
        py: Python<'_>,
        replica: &Bound<'_, PyReplica>,
        names: Vec<String>,
        tensors: &Bound<'_, PyAny>,
        fragments: Vec<Vec<usize>>,
        sync_every: u64,
        delay: u64,
        mixing: f32,
        eager: bool,
        outer: (String, f32, f32),
        bucket_elements: usize,
        rounds: Option<i64>,
        round_timeout: f64,
        feedback: Option<&Bound<'_, QuantizedGroup>>,
    ) -> PyResult<Self> {
        let core = replica.get().core().clone();
        core.is_at_home().or_raise(py)?;
        let config = DilocoConfig {
            sync_every,
            fragments: fragments.len(),
            delay,
            mixing,
            eager,
            outer: self::outer(&outer.0, outer.1, outer.2).or_raise(py)?,
            bucket_elements,
            rounds,
            round_timeout: options::duration(round_timeout).or_raise(py)?,
            ..DilocoConfig::default()
        };
        let tensors =
            list(tensors, "parameters", Access::Writes).map_err(|refused| refused.raise(py, "diloco", 0))?;
        if names.len() != tensors.len() {
            let text = format!("{} names for {} parameters", names.len(), tensors.len());
            return Err(Error::invalid(text)).or_raise(py);
        }
        let residuals = feedback.and_then(|group| group.get().residuals());
        let shared = Shared(core.clone());
        let run = apart(py, move || {
            let params = TensorParameters::new(names.into_iter().zip(tensors).collect(), None)?;
            let plan = FragmentPlan::new(fragments, &params)?;
            let run = Diloco::with_fragments(shared, params, config, plan)?;
            Ok(match residuals {
                Some(residuals) => run.with_error_feedback(residuals),
                None => run,
            })
        })?;
        Ok(Self {
            run: Arc::new(Mutex::new(run)),
            core,
        })
    }

    /// Joins the job, before the first inner step.
    fn begin(&self, py: Python<'_>, states: &Bound<'_, PyAny>) -> PyResult<Vec<Round>> {
        self.rounds(py, states, |run, state| run.begin(state))
    }

    /// After every inner step: begins and finishes the rounds that are due.
    fn after_inner_step(&self, py: Python<'_>, states: &Bound<'_, PyAny>) -> PyResult<Vec<Round>> {
        self.core.is_at_home().or_raise(py)?;
        if let Ok(mut run) = self.run.try_lock()
            && !run.next_step_syncs()
        {
            // It only counts, and asks nothing of the state.
            let reports = run.after_inner_step(&mut ()).or_raise(py)?;
            return Ok(reports.into_iter().map(Round::from).collect());
        }
        self.rounds(py, states, |run, state| run.after_inner_step(state))
    }

    /// A closing round without data, in which who is behind heals; then leaves. All replicas call it after the same round.
    fn finish(&self, py: Python<'_>, states: &Bound<'_, PyAny>) -> PyResult<()> {
        self.rounds(py, states, |run, state| run.finish(state).map(|()| Vec::new()))
            .map(drop)
    }

    /// Hands everything that this replica goes on from to the thread that writes. False if it is still at the one before.
    fn save(
        &self,
        py: Python<'_>,
        states: &Bound<'_, PyAny>,
        checkpoints: &Bound<'_, PyCheckpoints>,
    ) -> PyResult<bool> {
        let disk = checkpoints.get().disk().or_raise(py)?;
        if disk.is_busy() {
            return Ok(false);
        }
        let core = self.core.clone();
        self.call(py, states, move |run, state| {
            let mut saved = run.save(state)?;
            let (lineage, batches) =
                core.within(|m| Ok((m.lineage().as_str().to_owned(), m.batches_committed())))?;
            saved.set_metadata(BATCHES, batches.to_string());
            Ok(disk.offer(run.step().0, &lineage, saved))
        })
    }

    /// Before `begin`: goes on from the newest checkpoint that all replicas have. Its step, or `None` if there is none; and which ones are damaged.
    fn restore(
        &self,
        py: Python<'_>,
        states: &Bound<'_, PyAny>,
        checkpoints: &Bound<'_, PyCheckpoints>,
    ) -> PyResult<(Option<i64>, Vec<String>)> {
        let disk = checkpoints.get().disk().or_raise(py)?;
        let core = self.core.clone();
        self.call(py, states, move |run, state| {
            let search = disk.newest()?;
            let damaged = search.damaged.iter().map(ToString::to_string).collect::<Vec<_>>();
            let Some(found) = search.found else {
                if damaged.is_empty() {
                    return Ok((None, damaged));
                }
                let text = format!(
                    "no checkpoint of this replica under {} is whole, and a run does not begin anew over them: move them away, \
                     then it heals from another replica or begins anew ({})",
                    disk.root().display(),
                    damaged.join("; ")
                );
                return Err(Error::new(ErrorKind::Corrupt, text));
            };
            let batches = found.state.metadata().get(BATCHES).and_then(|b| b.parse().ok());
            let lineage = Lineage::from_peer(found.lineage);
            core.within(|m| m.restore(found.step, lineage, batches.unwrap_or_default()))?;
            run.restore(&found.state, state)?;
            Ok((Some(found.step.0), damaged))
        })
    }

    /// A hash over the global parameters, equal on all replicas of the same step.
    fn global_hash(&self, py: Python<'_>) -> PyResult<String> {
        self.core.is_at_home().or_raise(py)?;
        detached(py, || free(&self.run)?.global_hash()).or_raise(py)
    }
}
