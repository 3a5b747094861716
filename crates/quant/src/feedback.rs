//! Error feedback: what rounding lost of a reduction's values is kept and added to the values of the same reduction in the next step.
//!
//! The group cannot know which reduction is "the same": the caller says where a step begins and what it is about
//! ([`ErrorFeedback::begin`]), and within a step reductions are told apart by their order. What a step that did not count has
//! changed is forgotten, so that its repetition starts from the same residuals.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ftcore::{Error, ErrorKind, OpKind, Result};

/// The residuals of one rank. Get it from [`QuantizedGroup::error_feedback`](crate::QuantizedGroup::error_feedback).
///
/// Residuals are f32, one per value that this rank rounds: as many as the values it contributes and, in a two-shot all-reduce, as
/// the part that it sums. They belong to the rank: each saves and loads its own.
#[derive(Debug, Default)]
pub struct ErrorFeedback {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The scope of the present step; `None` before the first.
    scope: Option<String>,
    /// Which step this is, so that an operation that ends late cannot write into a later one.
    step: u64,
    /// How many reductions the step had so far.
    ordinal: u32,
    kept: BTreeMap<String, Vec<f32>>,
    /// Residuals of this step, kept once it counts.
    pending: BTreeMap<String, Vec<f32>>,
}

/// The place of one reduction's residuals.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    step: u64,
    name: String,
}

impl ErrorFeedback {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step. `committed` says whether the step before counted: if so its residuals are kept, otherwise they are forgotten.
    ///
    /// `scope` names what the step reduces, for instance a fragment: reductions in steps of the same scope with the same number in their step
    /// and the same count share residuals. Call it when the work of the step before has ended and before the first reduction of the new
    /// one is submitted; every rank on its own.
    pub fn begin(&self, scope: &str, committed: bool) {
        let mut state = self.lock();
        let pending = std::mem::take(&mut state.pending);
        if committed {
            for (name, residual) in pending {
                // The owner's residual belongs to a part, and parts move when the world changes.
                if let Some((base, _)) = name.split_once(OWNED) {
                    let stale: Vec<_> = state
                        .kept
                        .keys()
                        .filter(|k| k.split_once(OWNED).is_some_and(|(b, _)| b == base) && **k != name)
                        .cloned()
                        .collect();
                    for name in stale {
                        state.kept.remove(&name);
                    }
                }
                state.kept.insert(name, residual);
            }
        }
        state.scope = Some(scope.to_string());
        state.step += 1;
        state.ordinal = 0;
    }

    /// The residuals as of the last step that counted, by name: this rank's part of a checkpoint.
    pub fn state(&self) -> Vec<(String, Vec<f32>)> {
        let state = self.lock();
        state.kept.iter().map(|(n, r)| (n.clone(), r.clone())).collect()
    }

    /// Replaces all residuals by those of [`state`](Self::state).
    ///
    /// Errors: `InvalidArgument` naming a residual with values that are not finite; nothing is changed then.
    pub fn load(&self, residuals: Vec<(String, Vec<f32>)>) -> Result<()> {
        if let Some((name, _)) = residuals.iter().find(|(_, r)| r.iter().any(|v| !v.is_finite())) {
            return Err(Error::invalid(format!(
                "residual '{name}' has values that are not finite"
            )));
        }
        let mut state = self.lock();
        state.pending.clear();
        state.kept = residuals.into_iter().collect();
        Ok(())
    }

    /// The place of the next reduction's residuals.
    ///
    /// Errors: `InvalidState` if no step was begun.
    pub(crate) fn slot(&self, kind: OpKind, count: usize) -> Result<Slot> {
        let mut state = self.lock();
        let Some(scope) = &state.scope else {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "error feedback is on, but no step was begun: call ErrorFeedback::begin at the start of every step",
            ));
        };
        let name = format!("{scope}/{}.{}.{count}", state.ordinal, kind.name());
        state.ordinal += 1;
        Ok(Slot {
            step: state.step,
            name,
        })
    }

    /// Adds the residual of `part` of the slot, if there is one of that length, to `values`.
    pub(crate) fn add(&self, slot: &Slot, part: &str, values: &mut [f32]) {
        let state = self.lock();
        if let Some(residual) = state.kept.get(&format!("{}{part}", slot.name))
            && residual.len() == values.len()
        {
            for (v, r) in values.iter_mut().zip(residual) {
                *v += r;
            }
        }
    }

    /// Keeps `residual` for `part` of the slot until the step's fate is known.
    pub(crate) fn put(&self, slot: &Slot, part: &str, mut residual: Vec<f32>) {
        // What is not finite was visible once; it must not come back for ever.
        for r in &mut residual {
            if !r.is_finite() {
                *r = 0.0;
            }
        }
        let mut state = self.lock();
        if state.step == slot.step {
            state.pending.insert(format!("{}{part}", slot.name), residual);
        }
    }
}

/// The part that a rank contributes.
pub(crate) const SENT: &str = ".sent";

/// What the name of a part that a rank sums begins with.
const OWNED: &str = ".owned.";

/// The part that `rank` of `world` sums.
pub(crate) fn owned(rank: u32, world: u32) -> String {
    format!("{OWNED}{rank}of{world}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn residual(feedback: &ErrorFeedback, slot: &Slot, part: &str) -> f32 {
        let mut v = [0.0];
        feedback.add(slot, part, &mut v);
        v[0]
    }

    #[test]
    fn residuals_of_a_step_that_did_not_count_are_forgotten() {
        let f = ErrorFeedback::default();
        let e = f.slot(OpKind::AllReduce, 1).unwrap_err();
        assert!(
            e.kind() == ErrorKind::InvalidState && e.to_string().contains("begin"),
            "{e}"
        );
        f.begin("a", true);
        let first = f.slot(OpKind::AllReduce, 1).unwrap();
        f.put(&first, SENT, vec![0.5]);
        assert_eq!(residual(&f, &first, SENT), 0.0);
        f.begin("a", false);
        let again = f.slot(OpKind::AllReduce, 1).unwrap();
        assert_eq!(residual(&f, &again, SENT), 0.0);
        f.put(&again, SENT, vec![0.25]);
        // An operation of the step before that ends only now has no say.
        f.put(&first, SENT, vec![9.0]);
        f.begin("a", true);
        let next = f.slot(OpKind::AllReduce, 1).unwrap();
        assert_eq!(residual(&f, &next, SENT), 0.25);
        // The second of the step, another count and another scope have their own.
        assert_eq!(residual(&f, &f.slot(OpKind::AllReduce, 1).unwrap(), SENT), 0.0);
        f.begin("b", true);
        assert_eq!(residual(&f, &f.slot(OpKind::AllReduce, 1).unwrap(), SENT), 0.0);
    }

    #[test]
    fn state_is_loaded_back_and_what_is_not_finite_never_stays() {
        let f = ErrorFeedback::default();
        f.begin("a", true);
        let slot = f.slot(OpKind::AllReduce, 2).unwrap();
        f.put(&slot, SENT, vec![f32::NAN, 0.5]);
        assert!(f.state().is_empty());
        f.begin("a", true);
        let state = f.state();
        assert_eq!(state, [("a/0.all_reduce.2.sent".to_string(), vec![0.0, 0.5])]);
        let g = ErrorFeedback::default();
        g.load(state.clone()).unwrap();
        assert_eq!(g.state(), state);
        let e = g.load(vec![("x".to_string(), vec![f32::INFINITY])]).unwrap_err();
        assert!(e.to_string().contains("'x'"), "{e}");
        assert_eq!(g.state(), state);
    }

    #[test]
    fn an_owned_part_of_another_world_is_dropped() {
        let f = ErrorFeedback::default();
        for world in [4, 3] {
            f.begin("a", true);
            let slot = f.slot(OpKind::AllReduce, 8).unwrap();
            f.put(&slot, &owned(1, world), vec![0.5; 2]);
            f.put(&slot, SENT, vec![0.5; 8]);
        }
        f.begin("a", true);
        let names: Vec<_> = f.state().into_iter().map(|(n, _)| n).collect();
        assert_eq!(names, ["a/0.all_reduce.8.owned.1of3", "a/0.all_reduce.8.sent"]);
    }
}
