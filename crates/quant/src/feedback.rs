//! Error feedback: what rounding took from a reduction's values is kept as a residual and added to the values of the same reduction in the next step.
//!
//! The group cannot know which reduction is "the same": the caller says where a step begins and what it is about ([`ErrorFeedback::begin`]),
//! and within a step reductions are told apart by their order. The caller says too whether a step counted: what one that did not has
//! changed is forgotten, so that its repetition starts from the same residuals.
//!
//! A rank rounds in two roles, and what it owes is kept by place in the reduction, not by rank: for all values what it contributes, and
//! for the part that it sums what it makes known of the sum. When parts move, because the world changed, a rank pays what it owes of
//! sums that another one makes now with its own contribution.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ftcore::float_mode::DefaultMode;
use ftcore::{Error, ErrorKind, OpKind, Result};

/// What one rank owes. Get it from [`QuantizedGroup::error_feedback`](crate::QuantizedGroup::error_feedback).
///
/// Residuals are f32 in units of one rank's contribution: as many as the values of a reduction and, in a two-phase all-reduce, as many again as
/// the part that this rank sums. Every residual is paid once, by the rank that has it: each saves and loads its own. One
/// whose state comes from another rank (it heals) owes nothing: it loads no residuals.
#[derive(Debug, Default)]
pub struct ErrorFeedback {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The scope of the present step; `None` between steps.
    scope: Option<String>,
    /// Which step this is, so that an operation that ends late cannot write into a later one.
    step: u64,
    /// How many reductions the step had so far.
    ordinal: u32,
    kept: BTreeMap<String, Residuals>,
    /// Residuals of this step, kept once it counts.
    pending: BTreeMap<String, Residuals>,
}

/// What one rank owes of one reduction.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Residuals {
    /// Of what it contributed; one per value of the reduction.
    pub(crate) contributed: Vec<f32>,
    /// Of the sums that it made; they begin at `from`.
    pub(crate) summed: Vec<f32>,
    from: usize,
}

/// The place of one reduction's residuals.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    step: u64,
    name: String,
}

/// How the names in a saved state end.
const CONTRIBUTED: &str = ".contributed";
const SUMMED: &str = ".summed@";

impl Residuals {
    fn none(count: usize) -> Self {
        Self {
            contributed: vec![0.0; count],
            summed: Vec::new(),
            from: 0,
        }
    }

    /// The same residuals for a rank that sums `part` now: what it owes of other sums is paid with what it contributes. In the thread's own mode
    /// for floats, so not inlined: see [`DefaultMode`].
    #[inline(never)]
    fn for_part(mut self, part: &Range<usize>) -> Self {
        if self.from == part.start && self.summed.len() == part.len() {
            return self;
        }
        let mut summed = vec![0.0; part.len()];
        for (residual, place) in self.summed.iter().zip(self.from..) {
            let inside = place.checked_sub(part.start).and_then(|i| summed.get_mut(i));
            match inside {
                Some(to) => *to = *residual,
                None => {
                    if let Some(to) = self.contributed.get_mut(place) {
                        *to += residual;
                    }
                }
            }
        }
        Self {
            contributed: self.contributed,
            summed,
            from: part.start,
        }
    }
}

impl ErrorFeedback {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step; one that was begun before and neither committed nor rolled back is rolled back.
    ///
    /// `scope` names what the step reduces, for instance a fragment: reductions in steps of the same scope with the same number in their step
    /// and the same count share residuals. Call it when the work of the step before has ended and before the first reduction of the new
    /// one is submitted; every rank on its own.
    pub fn begin(&self, scope: &str) {
        let mut state = self.lock();
        state.pending.clear();
        state.scope = Some(scope.to_string());
        state.step += 1;
        state.ordinal = 0;
    }

    /// Ends the step: it counted, and its residuals replace those from before. Without a step nothing happens.
    pub fn commit(&self) {
        let mut state = self.lock();
        let pending = std::mem::take(&mut state.pending);
        state.kept.extend(pending);
        state.end();
    }

    /// Ends the step: it did not count, and what it changed is forgotten. Without a step nothing happens.
    pub fn rollback(&self) {
        let mut state = self.lock();
        state.pending.clear();
        state.end();
    }

    /// Ends the step, whether it `counted` ([`commit`](Self::commit)) or not ([`rollback`](Self::rollback)).
    pub fn end(&self, counted: bool) {
        if counted {
            self.commit();
        } else {
            self.rollback();
        }
    }

    /// The residuals as of the last step that counted, by name, in the order of the names: this rank's part of a checkpoint.
    pub fn state(&self) -> Vec<(String, Vec<f32>)> {
        let state = self.lock();
        let mut all = Vec::with_capacity(2 * state.kept.len());
        for (name, residuals) in &state.kept {
            all.push((format!("{name}{CONTRIBUTED}"), residuals.contributed.clone()));
            if !residuals.summed.is_empty() {
                all.push((
                    format!("{name}{SUMMED}{}", residuals.from),
                    residuals.summed.clone(),
                ));
            }
        }
        all
    }

    /// Replaces all residuals by this rank's own as [`state`](Self::state) gave them, for a run that goes on where it stopped: the next step gives the
    /// same bits. A step that was begun is rolled back.
    ///
    /// Errors: `InvalidArgument` naming what is not of a state, or not finite; nothing is changed then.
    pub fn load(&self, saved: Vec<(String, Vec<f32>)>) -> Result<()> {
        let kept = parse(saved)?;
        let mut state = self.lock();
        state.pending.clear();
        state.end();
        state.kept = kept;
        Ok(())
    }

    /// The place of the next reduction's residuals.
    ///
    /// Errors: `InvalidState` between steps.
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

    /// What this rank owes of the slot's `count` values if it sums `part` of them.
    pub(crate) fn residuals(&self, slot: &Slot, count: usize, part: &Range<usize>) -> Residuals {
        let kept = self.lock().kept.get(&slot.name).cloned();
        let _mode = DefaultMode::set();
        kept.filter(|d| d.contributed.len() == count)
            .unwrap_or_else(|| Residuals::none(count))
            .for_part(part)
    }

    /// Keeps `residuals` for the slot until the step's fate is known.
    pub(crate) fn put(&self, slot: &Slot, mut residuals: Residuals) {
        // What is not finite was visible once; it must not come back for ever.
        let both = residuals.contributed.iter_mut().chain(&mut residuals.summed);
        both.filter(|d| !d.is_finite()).for_each(|d| *d = 0.0);
        let mut state = self.lock();
        if state.step == slot.step && state.scope.is_some() {
            state.pending.insert(slot.name.clone(), residuals);
        }
    }
}

impl State {
    fn end(&mut self) {
        self.scope = None;
        self.step += 1;
    }
}

/// Reads what [`ErrorFeedback::state`] gave; it may come from a file or a peer (INV-10).
fn parse(saved: Vec<(String, Vec<f32>)>) -> Result<BTreeMap<String, Residuals>> {
    let bad = |name: &str, what: &str| Err(Error::invalid(format!("residual '{name}' {what}")));
    let mut kept: BTreeMap<String, Residuals> = BTreeMap::new();
    let mut sums = Vec::new();
    for (name, values) in saved {
        if !values.iter().all(|v| v.is_finite()) {
            return bad(&name, "has values that are not finite");
        }
        if let Some(reduction) = name.strip_suffix(CONTRIBUTED) {
            let count = reduction.rsplit_once('.').and_then(|(_, n)| n.parse().ok());
            if count != Some(values.len()) {
                return bad(
                    &name,
                    &format!("has {} values, not as many as it says", values.len()),
                );
            }
            let residuals = Residuals {
                contributed: values,
                ..Residuals::none(0)
            };
            kept.insert(reduction.to_string(), residuals);
        } else {
            sums.push((name, values));
        }
    }
    for (name, values) in sums {
        let place = name.rsplit_once(SUMMED);
        let place = place.and_then(|(reduction, from)| Some((reduction, from.parse::<usize>().ok()?)));
        let Some((residuals, from)) = place.and_then(|(r, from)| Some((kept.get_mut(r)?, from))) else {
            return bad(&name, "does not belong to a saved state");
        };
        let end = from.checked_add(values.len());
        if !residuals.summed.is_empty() || end.is_none_or(|end| end > residuals.contributed.len()) {
            return bad(&name, "is not a part of its reduction");
        }
        (residuals.summed, residuals.from) = (values, from);
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(f: &ErrorFeedback, count: usize) -> Slot {
        f.slot(OpKind::AllReduce, count).unwrap()
    }

    fn contributed(f: &ErrorFeedback, slot: &Slot) -> f32 {
        f.residuals(slot, 1, &(0..0)).contributed[0]
    }

    fn residuals(contributed: &[f32], from: usize, summed: &[f32]) -> Residuals {
        Residuals {
            contributed: contributed.to_vec(),
            summed: summed.to_vec(),
            from,
        }
    }

    #[test]
    fn l13_residuals_of_a_step_that_did_not_count_are_forgotten() {
        let f = ErrorFeedback::default();
        let between = |f: &ErrorFeedback| {
            let e = f.slot(OpKind::AllReduce, 1).unwrap_err();
            assert!(
                e.kind() == ErrorKind::InvalidState && e.to_string().contains("begin"),
                "{e}"
            );
        };
        between(&f);
        f.begin("a");
        let first = slot(&f, 1);
        f.put(&first, residuals(&[0.5], 0, &[]));
        assert_eq!(contributed(&f, &first), 0.0, "not before the step counts");
        f.rollback();
        between(&f);
        f.begin("a");
        let again = slot(&f, 1);
        assert_eq!(contributed(&f, &again), 0.0);
        f.put(&again, residuals(&[0.25], 0, &[]));
        // An operation of the step before that ends only now has no say.
        f.put(&first, residuals(&[9.0], 0, &[]));
        f.commit();
        between(&f);
        f.put(&again, residuals(&[8.0], 0, &[]));
        f.commit();
        f.begin("a");
        let next = slot(&f, 1);
        assert_eq!(contributed(&f, &next), 0.25);
        // The second of the step, another count and another scope have their own.
        assert_eq!(contributed(&f, &slot(&f, 1)), 0.0);
        f.put(&next, residuals(&[7.0], 0, &[]));
        f.begin("b");
        assert_eq!(contributed(&f, &slot(&f, 1)), 0.0);
        // What was neither committed nor rolled back was rolled back.
        f.begin("a");
        assert_eq!(contributed(&f, &slot(&f, 1)), 0.25);
    }

    #[test]
    fn state_is_loaded_back_and_what_is_not_finite_never_stays() {
        let f = ErrorFeedback::default();
        f.begin("a");
        f.put(&slot(&f, 2), residuals(&[f32::NAN, 0.5], 1, &[f32::INFINITY]));
        assert!(f.state().is_empty());
        f.commit();
        let state = f.state();
        let name = "a/0.all_reduce.2";
        let expected = [
            (format!("{name}.contributed"), vec![0.0, 0.5]),
            (format!("{name}.summed@1"), vec![0.0]),
        ];
        assert_eq!(state, expected);
        let g = ErrorFeedback::default();
        g.load(state.clone()).unwrap();
        assert_eq!(g.state(), state);
        let bad = |name: &str, values: &[f32], text: &str| {
            let more = state.iter().cloned().chain([(name.to_string(), values.to_vec())]);
            let e = g.load(more.collect()).unwrap_err().to_string();
            assert!(e.contains(name) && e.contains(text), "{e}");
            assert_eq!(g.state(), state);
        };
        bad("x/0.all_reduce.1.contributed", &[f32::INFINITY], "not finite");
        bad("x/0.all_reduce.2.contributed", &[0.0], "not as many");
        bad("x/0.all_reduce.2.summed@0", &[0.0], "does not belong");
        bad("a/0.all_reduce.2.summed@2", &[0.0], "not a part");
        bad("weights", &[0.0], "does not belong");
    }

    #[test]
    fn what_is_owed_of_sums_that_others_make_now_is_paid_with_the_contribution() {
        let f = ErrorFeedback::default();
        f.begin("a");
        let at = slot(&f, 6);
        f.put(&at, residuals(&[1.0; 6], 2, &[10.0, 20.0]));
        f.commit();
        let total = |d: &Residuals| d.contributed.iter().sum::<f32>() + d.summed.iter().sum::<f32>();
        for (part, contributed, summed) in [
            (2..4, [1.0; 6], vec![10.0, 20.0]),
            (3..6, [1.0, 1.0, 11.0, 1.0, 1.0, 1.0], vec![20.0, 0.0, 0.0]),
            (0..3, [1.0, 1.0, 1.0, 21.0, 1.0, 1.0], vec![0.0, 0.0, 10.0]),
            (0..0, [1.0, 1.0, 11.0, 21.0, 1.0, 1.0], vec![]),
            (4..6, [1.0, 1.0, 11.0, 21.0, 1.0, 1.0], vec![0.0, 0.0]),
        ] {
            let d = f.residuals(&at, 6, &part);
            assert_eq!(d, residuals(&contributed, part.start, &summed), "{part:?}");
            assert_eq!(total(&d), 36.0, "every residual is there once");
        }
        assert_eq!(f.residuals(&at, 5, &(0..5)), residuals(&[0.0; 5], 0, &[0.0; 5]));
    }
}
