//! Progress while a run goes on, on standard error: a bar per replica on a terminal, plain lines elsewhere (at most one
//! per second and replica, and one for every change of state, kill and recovery).

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use oxccl::launch::{EventKind, ReplicaEvent, ReplicaState};
use oxccl_launch::{ExitSummary, SupervisorEvent};

use crate::report::{bytes, thousands};

/// Between two plain lines of one replica, in microseconds.
const LINE_EVERY_US: u64 = 1_000_000;

/// What is known about one replica.
#[derive(Debug, Clone, Default)]
struct View {
    state: String,
    inner_step: u64,
    loss: Option<f64>,
    tokens_per_s: f64,
    quorum: u32,
    bytes: u64,
    /// Bytes of earlier incarnations.
    bytes_before: u64,
    last_line_us: Option<u64>,
}

impl View {
    fn message(&self) -> String {
        let loss = self
            .loss
            .map_or_else(|| "     -".into(), |loss| format!("{loss:.4}"));
        format!(
            "loss {loss:>6}  {:>7} tokens/s  quorum {}  {:>8}  {}",
            thousands(self.tokens_per_s.round() as u64),
            self.quorum,
            bytes(self.bytes_before + self.bytes),
            self.state
        )
    }
}

enum Screen {
    Bars {
        all: MultiProgress,
        bars: BTreeMap<u32, ProgressBar>,
        colour: bool,
    },
    Lines(Box<dyn Write + Send>),
}

/// Shows the events of a run as they come.
pub struct Progress {
    screen: Screen,
    views: BTreeMap<u32, View>,
    inner_steps: u64,
    ranks: u32,
    start_us: Option<u64>,
}

impl Progress {
    /// For a run whose replicas compute `inner_steps` steps each: bars if standard error is a terminal (without colours
    /// if `NO_COLOR` is set), else lines.
    pub fn new(inner_steps: u64) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::lines(inner_steps, std::io::stderr());
        }
        let colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        Self::with(
            Screen::Bars {
                all,
                bars: BTreeMap::new(),
                colour,
            },
            inner_steps,
        )
    }

    /// Plain lines to `out`; an error there is ignored, since a run does not depend on being watched.
    pub fn lines(inner_steps: u64, out: impl Write + Send + 'static) -> Self {
        Self::with(Screen::Lines(Box::new(out)), inner_steps)
    }

    fn with(screen: Screen, inner_steps: u64) -> Self {
        Self {
            screen,
            views: BTreeMap::new(),
            inner_steps,
            ranks: 1,
            start_us: None,
        }
    }

    /// How many ranks a replica has (1 if not said). What its first rank reports stands for the replica.
    #[must_use]
    pub fn with_ranks(self, ranks: u32) -> Self {
        Self { ranks, ..self }
    }

    /// A process, for people.
    fn rank_of(&self, replica: u32, rank: u32) -> String {
        match self.ranks {
            1 => format!("replica {replica}"),
            _ => format!("replica {replica}, rank {rank},"),
        }
    }

    /// Shows one event.
    pub fn on_event(&mut self, event: &SupervisorEvent) {
        match event {
            SupervisorEvent::LighthouseUp { url, t_us } => self.say(*t_us, &format!("lighthouse at {url}")),
            SupervisorEvent::LighthouseExited {
                exit,
                restart_in_ms,
                tail,
                t_us,
            } => {
                self.say(
                    *t_us,
                    &format!("lighthouse ended ({exit}){}", after(*restart_in_ms)),
                );
                self.say_tail(*t_us, tail);
            }
            SupervisorEvent::Spawned {
                replica,
                rank,
                incarnation,
                pid,
                t_us,
            } => {
                let view = self.views.entry(*replica).or_default();
                view.bytes_before += std::mem::take(&mut view.bytes);
                view.state = "starting".into();
                let again = if *incarnation > 0 {
                    format!(" again (incarnation {incarnation})")
                } else {
                    String::new()
                };
                let of = self.rank_of(*replica, *rank);
                self.say(*t_us, &format!("{of} started{again}, process {pid}"));
                self.redraw(*replica);
            }
            SupervisorEvent::Exited {
                replica,
                rank,
                status,
                signal,
                tail,
                restart_in_ms,
                t_us,
                ..
            } => {
                let exit = ExitSummary {
                    status: *status,
                    signal: *signal,
                };
                let of = self.rank_of(*replica, *rank);
                let view = self.views.entry(*replica).or_default();
                if exit.success() {
                    view.state = "done".into();
                } else {
                    view.state = match signal {
                        Some(_) => format!("killed ({exit})"),
                        None => format!("failed ({exit})"),
                    };
                    self.say(*t_us, &format!("{of} ended: {exit}{}", after(*restart_in_ms)));
                    // After a signal the process's own last lines explain nothing.
                    if signal.is_none() {
                        self.say_tail(*t_us, tail);
                    }
                }
                self.redraw(*replica);
            }
            SupervisorEvent::Replica(event) => self.on_replica(event),
            SupervisorEvent::Finished(_) => {}
        }
    }

    fn on_replica(&mut self, event: &ReplicaEvent) {
        let (r, t_us) = (event.replica, event.t_us);
        if event.rank > 0 {
            if let EventKind::Error { text } = &event.kind {
                let of = self.rank_of(r, event.rank);
                self.say(t_us, &format!("{of} {text}"));
            }
            return;
        }
        let view = self.views.entry(r).or_default();
        match &event.kind {
            EventKind::Step {
                inner_step,
                loss,
                tokens_per_s,
            } => {
                (view.inner_step, view.loss, view.tokens_per_s) = (*inner_step, Some(*loss), *tokens_per_s);
                let due = view
                    .last_line_us
                    .is_none_or(|last| t_us.saturating_sub(last) >= LINE_EVERY_US);
                if due {
                    view.last_line_us = Some(t_us);
                    self.line(r, t_us);
                }
            }
            EventKind::State { state } => {
                if view.state != state.as_str() {
                    view.state = state.as_str().into();
                    // Training and waiting alternate with every outer step; as lines they would drown the rest.
                    if !matches!(state, ReplicaState::Training | ReplicaState::Waiting) {
                        self.line(r, t_us);
                    }
                }
            }
            EventKind::Quorum { size, epoch, .. } => {
                let changed = view.quorum != *size;
                view.quorum = *size;
                if changed {
                    let members = if *size == 1 { "replica" } else { "replicas" };
                    self.say(
                        t_us,
                        &format!("replica {r}: quorum of {size} {members} (epoch {epoch})"),
                    );
                }
            }
            EventKind::Commit(commit) => {
                view.bytes = commit.bytes_sent + commit.bytes_recv;
                if commit.failed_attempts > 0 {
                    let (step, epoch, failed) = (commit.step, commit.epoch, commit.failed_attempts);
                    self.say(
                        t_us,
                        &format!("replica {r}: step {step} committed in epoch {epoch}, failed attempts before: {failed}"),
                    );
                }
            }
            EventKind::Healed {
                step,
                bytes: size,
                ms,
            } => {
                let text = format!(
                    "replica {r} healed to step {step}: {} in {ms:.0} ms",
                    bytes(*size)
                );
                self.say(t_us, &text);
            }
            EventKind::Error { text } => {
                let text = format!("replica {r}: {text}");
                self.say(t_us, &text);
            }
            EventKind::Final(end) => {
                view.bytes = end.bytes_sent + end.bytes_recv;
                view.state = end.state.as_str().into();
                if end.state == ReplicaState::Drained {
                    let text = format!("replica {r} was drained: it left after {} steps", end.step);
                    self.say(t_us, &text);
                }
                self.line(r, t_us);
            }
            EventKind::Started { .. } | EventKind::ReduceBegin { .. } => {}
        }
        self.redraw(r);
    }

    /// The end: the bars stay as they are.
    pub fn finish(&mut self) {
        if let Screen::Bars { bars, .. } = &self.screen {
            for bar in bars.values() {
                bar.abandon();
            }
        }
    }

    fn stamp(&mut self, t_us: u64) -> String {
        let start = *self.start_us.get_or_insert(t_us);
        format!("{:7.1} s", t_us.saturating_sub(start) as f64 / 1e6)
    }

    /// A line of its own: above the bars, or among the lines.
    fn say(&mut self, t_us: u64, text: &str) {
        let stamp = self.stamp(t_us);
        match &mut self.screen {
            Screen::Bars { all, .. } => drop(all.println(format!("{stamp}  {text}"))),
            Screen::Lines(out) => drop(writeln!(out, "{stamp}  {text}")),
        }
    }

    fn say_tail(&mut self, t_us: u64, tail: &str) {
        for line in tail.lines() {
            self.say(t_us, &format!("  | {line}"));
        }
    }

    /// The state of one replica as a line; on a terminal its bar shows that.
    fn line(&mut self, replica: u32, t_us: u64) {
        let stamp = self.stamp(t_us);
        let (Screen::Lines(out), Some(view)) = (&mut self.screen, self.views.get(&replica)) else {
            return;
        };
        drop(writeln!(
            out,
            "{stamp}  replica {replica}  step {:>5}/{}  {}",
            view.inner_step,
            self.inner_steps,
            view.message()
        ));
    }

    fn redraw(&mut self, replica: u32) {
        let (Screen::Bars { all, bars, colour }, Some(view)) = (&mut self.screen, self.views.get(&replica))
        else {
            return;
        };
        let bar = bars.entry(replica).or_insert_with(|| {
            let bar = all.add(ProgressBar::new(self.inner_steps));
            let template = match colour {
                true => "{prefix:.bold} {bar:24.cyan/dim} {pos:>5}/{len}  {msg}",
                false => "{prefix} {bar:24} {pos:>5}/{len}  {msg}",
            };
            // A template that does not parse (it does) leaves the usual style.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("━╸─"));
            }
            bar.set_prefix(format!("replica {replica}"));
            bar
        });
        bar.set_position(view.inner_step.min(self.inner_steps));
        bar.set_message(view.message());
    }
}

fn after(restart_in_ms: Option<u64>) -> String {
    restart_in_ms.map_or(String::new(), |ms| {
        format!("; restarting in {:.1} s", ms as f64 / 1e3)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn shown(events: &[SupervisorEvent]) -> Vec<String> {
        let out = Captured::default();
        let mut progress = Progress::lines(100, out.clone());
        for event in events {
            progress.on_event(event);
        }
        progress.finish();
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn replica(replica: u32, t_us: u64, kind: EventKind) -> SupervisorEvent {
        SupervisorEvent::Replica(ReplicaEvent {
            replica,
            incarnation: 0,
            rank: 0,
            t_us,
            kind,
        })
    }

    #[test]
    fn steps_are_at_most_one_line_per_second_and_replica() {
        let steps: Vec<SupervisorEvent> = (0..500u64)
            .flat_map(|i| {
                let step = |r| {
                    let kind = EventKind::Step {
                        inner_step: i,
                        loss: 2.0,
                        tokens_per_s: 12_345.0,
                    };
                    replica(r, i * 10_000, kind)
                };
                [step(0), step(1)]
            })
            .collect();
        let lines = shown(&steps);
        assert_eq!(lines.len(), 2 * 5, "{lines:#?}");
        assert!(
            lines[9].contains("replica 1") && lines[9].contains("loss 2.0000") && lines[9].contains("12,345")
        );
    }

    #[test]
    fn a_kill_and_the_recovery_are_shown_at_once() {
        let lines = shown(&[
            SupervisorEvent::Spawned {
                replica: 1,
                rank: 0,
                incarnation: 0,
                pid: 10,
                t_us: 0,
            },
            replica(
                1,
                1,
                EventKind::Quorum {
                    epoch: 1,
                    step: 0,
                    size: 2,
                },
            ),
            SupervisorEvent::Exited {
                replica: 1,
                rank: 0,
                incarnation: 0,
                status: None,
                signal: Some(9),
                tail: "noise".into(),
                restart_in_ms: Some(500),
                cause: Some(0),
                t_us: 2_000_000,
            },
            replica(
                0,
                2_100_000,
                EventKind::Quorum {
                    epoch: 2,
                    step: 3,
                    size: 1,
                },
            ),
            SupervisorEvent::Spawned {
                replica: 1,
                rank: 0,
                incarnation: 1,
                pid: 11,
                t_us: 2_500_000,
            },
            replica(
                1,
                2_600_000,
                EventKind::State {
                    state: ReplicaState::Healing,
                },
            ),
            replica(
                1,
                2_700_000,
                EventKind::Healed {
                    step: 3,
                    bytes: 4_000_000,
                    ms: 80.0,
                },
            ),
        ]);
        let wanted = [
            "replica 1 started, process 10",
            "replica 1: quorum of 2 replicas (epoch 1)",
            "    2.0 s  replica 1 ended: SIGKILL; restarting in 0.5 s",
            "replica 0: quorum of 1 replica (epoch 2)",
            "replica 1 started again (incarnation 1), process 11",
            "healing",
            "replica 1 healed to step 3: 4.0 MB in 80 ms",
        ];
        assert_eq!(lines.len(), wanted.len(), "{lines:#?}");
        for (line, wanted) in lines.iter().zip(wanted) {
            assert!(line.contains(wanted), "{line} should contain {wanted}");
        }
    }
}
