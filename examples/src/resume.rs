//! Checkpoints of a training program, so that a job of which nothing is left goes on from its last whole one.
//!
//! Every so many steps each replica copies its state and hands it to a thread that writes it ([`checkpoint::Writer`]). A replica
//! that starts looks for the newest one that all have ([`checkpoint::newest`]), is put back to that step, and joins the others
//! there. With each state stand the options that decide what is computed; a checkpoint of other ones is refused by name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use checkpoint::{Found, Search, Series, StateDict, Writer, newest, peek, steps};
use ftcore::{Error, ErrorKind, Result, Step, deadline_in};
use manager::{Manager, Replica as _};
use oxccl::launch::{EventKind, EventSender, ReplicaEnv};

use crate::replica::RecentLoss;

/// Where and how often the state goes to disk; the same for both programs.
#[derive(Debug, Clone, clap::Args)]
pub struct CheckpointArgs {
    /// Write checkpoints to this folder, and go on from what is there: the same command after a loss of everything ends as if
    /// nothing had been lost. Across machines, a folder that all see gives the same bits; separate ones a valid run.
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// A checkpoint every so many steps (rounds), and at the end; default: a twentieth of the run.
    #[arg(long, value_name = "N", requires = "checkpoint_dir", value_parser = clap::value_parser!(i64).range(1..))]
    pub checkpoint_every: Option<i64>,
    /// Keep so many of each replica; older ones are removed.
    #[arg(long, value_name = "K", requires = "checkpoint_dir", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub checkpoint_keep: u16,
}

impl CheckpointArgs {
    /// The same arguments on a command line, for the replicas.
    pub fn to_args(&self) -> Vec<String> {
        let Some(dir) = &self.checkpoint_dir else {
            return Vec::new();
        };
        let mut args = vec!["--checkpoint-dir".to_owned(), dir.display().to_string()];
        args.extend(["--checkpoint-keep".to_owned(), self.checkpoint_keep.to_string()]);
        if let Some(n) = self.checkpoint_every {
            args.extend(["--checkpoint-every".to_owned(), n.to_string()]);
        }
        args
    }

    /// Looks at what is in the folder before anything is started, from the headers alone: a line that says from where a run would
    /// go on, if there is something. Errors: `InvalidArgument` for checkpoints of a run with other options than `run`.
    pub fn check(&self, run: &str, replicas: u32) -> Result<Option<String>> {
        let Some(root) = &self.checkpoint_dir else {
            return Ok(None);
        };
        let mut last = Vec::new();
        for replica in 0..replicas {
            // What cannot be read is damage, which the replica itself deals with.
            for step in steps(root, replica)?.into_iter().rev() {
                if let Ok(metadata) = peek(root, replica, step) {
                    same_run(&metadata, run, &format!("replica {replica}, step {step}"), root)?;
                    last.push(format!("replica {replica} up to step {step}"));
                    break;
                }
            }
        }
        let line = format!("checkpoints in {}: {}", root.display(), last.join(", "));
        Ok((!last.is_empty()).then_some(line))
    }
}

/// Under this key the options stand with a state.
const RUN: &str = "run";
/// Under this name the last losses stand in a state.
const RECENT: &str = "program/recent";
/// Under this name the number of batches that led to a state stands in it.
const BATCHES: &str = "program/batches_committed";
/// How long the end of a run waits for a checkpoint that is being written.
const FLUSH: Duration = Duration::from_secs(20);
/// How long a new incarnation waits for the one before to let go of its folder.
const LET_GO: Duration = Duration::from_secs(10);

/// `Ok` if the state that `what` names was saved by a run with the same options.
fn same_run(
    metadata: &std::collections::BTreeMap<String, String>,
    run: &str,
    what: &str,
    root: &Path,
) -> Result<()> {
    let theirs = metadata.get(RUN).map_or("", String::as_str);
    if theirs == run {
        return Ok(());
    }
    let only = |a: &str, b: &str| {
        let lines: Vec<&str> = a.lines().filter(|l| !b.lines().any(|m| m == *l)).collect();
        if lines.is_empty() {
            "nothing of that".to_owned()
        } else {
            lines.join(", ")
        }
    };
    Err(Error::invalid(format!(
        "the checkpoint of {what} in {} is of another run: {} there, {} here. Use the same options, or another --checkpoint-dir",
        root.display(),
        only(theirs, run),
        only(run, theirs)
    )))
}

/// The checkpoints of one replica of a run.
pub struct Checkpoints {
    /// Of the first rank: all ranks of a replica hold the same state.
    writer: Option<Writer>,
    every: i64,
    run: String,
    events: EventSender,
    found: Option<Found>,
    /// This replica had checkpoints and none is whole: it may take its state from the others, and must not begin anew.
    must_heal: bool,
}

/// Says something that went wrong with a checkpoint where people look: in the log and on the driver's display.
fn warn(events: &EventSender, text: String) {
    tracing::warn!("{text}");
    events.send(EventKind::Error { text });
}

impl Checkpoints {
    /// Opens the folder, if one is given, and reads the checkpoint to go on from. `steps` are those of the run.
    ///
    /// Errors: `InvalidArgument` for a checkpoint of a run with other options than `run`; those of [`Series::open`].
    pub fn open(
        args: &CheckpointArgs,
        env: &ReplicaEnv,
        events: &EventSender,
        run: &str,
        steps: i64,
    ) -> Result<Option<Self>> {
        let Some(root) = &args.checkpoint_dir else {
            return Ok(None);
        };
        let keep = usize::from(args.checkpoint_keep);
        let series = match env.rank {
            0 => Some(Series::open(root, env.replica, keep, deadline_in(LET_GO))?),
            _ => None,
        };
        // A replica that comes back into a running job heals in any case, and the others' files change under its eyes.
        let others = if env.incarnation == 0 {
            0..env.replicas
        } else {
            0..0
        };
        let Search { found, damaged } = newest(root, env.replica, others)?;
        for error in &damaged {
            let instead = match &found {
                Some(found) => format!("step {} is taken instead", found.step),
                None => "there is no other".to_owned(),
            };
            warn(
                events,
                format!("a damaged checkpoint is left out; {instead}: {error}"),
            );
        }
        if let Some(found) = &found {
            let what = format!("replica {}, step {}", env.replica, found.step);
            same_run(found.state.metadata(), run, &what, root)?;
            tracing::info!(step = %found.step, file = %found.path.display(), "going on from a checkpoint");
        }
        let must_heal = found.is_none() && !damaged.is_empty();
        let told = events.clone();
        let report = move |outcome: &ftcore::Result<checkpoint::Written>| match outcome {
            Ok(w) => {
                tracing::info!(step = %w.step, bytes = w.bytes, file = %w.path.display(), "checkpoint written")
            }
            Err(error) => warn(
                &told,
                format!("a checkpoint could not be written; training goes on: {error}"),
            ),
        };
        let writer = series.map(|series| Writer::start(series, report)).transpose()?;
        Ok(Some(Self {
            writer,
            every: args.checkpoint_every.unwrap_or((steps / 20).max(1)),
            run: run.to_owned(),
            events: events.clone(),
            found,
            must_heal,
        }))
    }

    /// Puts `manager` back to the step of the checkpoint, if there is one. Before the first quorum.
    pub fn restore(&self, manager: &mut Manager) -> Result<()> {
        match &self.found {
            Some(found) => {
                // Checkpoints from before the number was kept have none.
                let batches = match found.state.get(BATCHES) {
                    Some(_) => found.state.get_i64s(BATCHES)?.first().copied().unwrap_or(0),
                    None => 0,
                };
                manager.restore(found.step, manager::Lineage::from_peer(&found.lineage), batches)
            }
            None => Ok(()),
        }
    }

    /// The state to go on from, once; the last losses go to `recent`.
    pub fn take(&mut self, recent: &mut RecentLoss) -> Result<Option<StateDict>> {
        let Some(found) = self.found.take() else {
            return Ok(None);
        };
        recent.load(&found.state.get_f32(RECENT)?);
        Ok(Some(found.state))
    }

    /// True if the state in which `step` begins is to be written: each so many steps, and the last one, for whose sake the one
    /// before is waited for.
    pub fn is_due(&self, step: Step, is_last: bool) -> bool {
        if is_last {
            self.flush();
        }
        self.writer.is_some() && step > Step(0) && (is_last || step.0 % self.every == 0)
    }

    /// Hands over `state`, in which `manager`'s step begins, to be written. Does not wait.
    pub fn offer(
        &self,
        manager: &Manager,
        step: Step,
        mut state: StateDict,
        recent: &RecentLoss,
    ) -> Result<()> {
        let losses = recent.values();
        state.insert_f32(RECENT, &[losses.len()], &losses)?;
        state.insert_i64s(BATCHES, &[manager.batches_committed()])?;
        state.set_metadata(RUN, self.run.as_str());
        let Some(writer) = &self.writer else {
            return Ok(());
        };
        if !writer.offer(step, manager.lineage().as_str(), state) {
            let text = format!(
                "no checkpoint of step {step}: the one before is still being written. The disk is slower than --checkpoint-every {}",
                self.every
            );
            warn(&self.events, text);
        }
        Ok(())
    }

    /// Refuses to begin anew over checkpoints of which none is whole: `InvalidState` if `step` is the first.
    pub fn check_start(&self, step: Step) -> Result<()> {
        if self.must_heal && step == Step(0) {
            let text = "none of the checkpoints here is whole, and there was no replica to take the state from: move them away to begin anew";
            return Err(Error::new(ErrorKind::InvalidState, text));
        }
        Ok(())
    }

    /// Waits until nothing is being written, or says that something still is.
    pub fn flush(&self) {
        let flushed = self
            .writer
            .as_ref()
            .map_or(Ok(()), |w| w.flush(deadline_in(FLUSH)));
        if let Err(error) = flushed {
            warn(&self.events, format!("at the end of the run: {error}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_run_is_told_by_the_options_that_differ() {
        let metadata = [(RUN.to_owned(), "train_ddp\n--seed 1\n--lr 2".to_owned())].into();
        let root = Path::new("/d");
        same_run(&metadata, "train_ddp\n--seed 1\n--lr 2", "x", root).unwrap();
        let e = same_run(
            &metadata,
            "train_ddp\n--seed 3\n--lr 2\n--quantize int8",
            "replica 0, step 4",
            root,
        )
        .unwrap_err();
        let text = e.to_string();
        for part in [
            "replica 0, step 4 in /d",
            "--seed 1 there",
            "--seed 3, --quantize int8 here",
        ] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!text.contains("--lr"), "{text}");
    }
}
