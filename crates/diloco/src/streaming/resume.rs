//! A run that is stopped and goes on: what a checkpoint on disk holds besides the state that heals, and how it is taken up again.

use ftcore::{Error, ErrorKind, Result};
use replica::StateDict;
use replica::{Replica, State};

use crate::{Diloco, Parameters};

/// Names in a saved run, besides those of the state that heals.
const STEP: &str = "diloco/step";
const GRADIENT: &str = "diloco/gradient";
/// There if the gradient, and what its fragment holds, are copies of another replica's work.
const COPY: &str = "diloco/copy";

impl<R: Replica, P: Parameters> Diloco<R, P> {
    /// Everything that this replica goes on from, for a checkpoint on disk: the state that also heals, the step, and the outer
    /// gradient of a round in flight. Between any two inner steps.
    ///
    /// Errors: `InvalidState` before `begin`, and after an error that left the state written in part; those of a device that holds parameters
    /// or copies.
    pub fn save(&mut self, inner: &mut dyn State) -> Result<StateDict> {
        self.rounds.check_begun()?;
        let mut out = StateDict::new();
        out.insert_i64s(STEP, &[self.step().0])?;
        if let Some(values) = self.rounds.kept() {
            out.insert_f32(GRADIENT, &[values.len()], values)?;
        }
        if self.rounds.is_copy() {
            out.insert_i64s(COPY, &[1])?;
        }
        self.whole(inner, true).save(&mut out)?;
        Ok(out)
    }

    /// Goes on from what [`save`](Self::save) gave on this replica; `begin` comes next. If all replicas of a run do so, the run ends with
    /// the same bits as if it had never been stopped; one that is behind the others heals. The [`Replica`] must stand at the saved step
    /// (`Manager::restore`, with the lineage that was the manager's then).
    ///
    /// Errors: `InvalidState` if the replica stands at another step, or the run has begun; `InvalidArgument` or `NotFound` for a state that is not of
    /// such a run, with nothing changed; those of `inner` or of a device, which leave a state of no step.
    pub fn restore(&mut self, from: &StateDict, inner: &mut dyn State) -> Result<()> {
        self.rounds.may_restore()?;
        let (saved, now) = (from.get_i64s(STEP)?, self.step());
        if saved != [now.0] {
            let text = format!(
                "the saved state is of step {saved:?}, the replica stands at {now}: restore the replica first"
            );
            return Err(Error::new(ErrorKind::InvalidState, text));
        }
        let gradient = match from.get(GRADIENT) {
            Some(_) => Some(from.get_f32(GRADIENT)?),
            None => None,
        };
        let fragment = self.fragments.get(self.fragment_at(now));
        let expected = fragment.map(|f| f.global.counts().sum::<usize>());
        if let (Some(gradient), Some(expected)) = (&gradient, expected)
            && gradient.len() != expected
        {
            let text = format!(
                "the saved outer gradient has {} values, its fragment {expected}",
                gradient.len()
            );
            return Err(Error::invalid(text));
        }
        self.whole(inner, true).load(from)?;
        let is_copy = from.get(COPY).is_some();
        self.rounds.restored(now, gradient, is_copy);
        if is_copy {
            self.replica.set_healed();
        }
        Ok(())
    }
}
