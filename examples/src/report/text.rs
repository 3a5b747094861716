//! The report as text, at most 100 columns wide: a table of the replicas, then one aligned paragraph per subject.

use std::fmt;

use super::subject::subject;
use super::{Death, Report};

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} replicas{}, {} parameters, seed {}, {:.1} s\n",
            self.program,
            self.replicas,
            match self.ranks {
                1 => String::new(),
                ranks => format!(" of {ranks} ranks"),
            },
            thousands(self.parameters),
            self.seed,
            self.wall_s
        )?;
        let dash = || "-".to_owned();
        // Two lines, so that the table is not wider than its figures.
        let mut rows = vec![
            [
                "", "", "inner", "", "", "last", "train", "held-", "tokens", "", "", "longest",
            ]
            .map(str::to_owned),
            [
                "replica", "starts", "steps", "commits", "retried", "step", "loss", "out", "/s", "sent",
                "received", "stall",
            ]
            .map(str::to_owned),
        ];
        for r in &self.figures {
            rows.push([
                match self.ranks {
                    1 => r.replica.to_string(),
                    _ => format!("{}/{}", r.replica, r.rank),
                },
                r.incarnations.to_string(),
                r.inner_steps.to_string(),
                r.commits.to_string(),
                r.failed_commits.to_string(),
                r.last_step.map_or_else(dash, |s| s.to_string()),
                r.train_loss.map_or_else(dash, |x| format!("{x:.4}")),
                r.heldout_loss.map_or_else(dash, |x| format!("{x:.4}")),
                thousands(r.tokens_per_s.round() as u64),
                bytes(r.bytes_sent),
                bytes(r.bytes_recv),
                time(r.longest_stall_ms),
            ]);
        }
        let widths: Vec<usize> = (0..rows.first().map_or(0, |r| r.len()))
            .map(|i| {
                rows.iter()
                    .filter_map(|r| r.get(i))
                    .map(|cell| cell.chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        for row in &rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, &w)| format!("{cell:>w$}"))
                .collect();
            writeln!(f, "{}", cells.join("  "))?;
        }
        writeln!(f)?;
        match &self.cost {
            // With a campaign they are too many to be told one by one.
            Some(cost) => write!(f, "{cost}")?,
            None => {
                for death in &self.deaths {
                    subject(f, "death", &self.death(death))?;
                }
            }
        }
        if let Some(stall) = &self.longest_stall {
            let during = match stall.death_of {
                Some(replica) => format!(", while replica {replica} died"),
                None => String::new(),
            };
            subject(
                f,
                "longest stall",
                &format!(
                    "{} (replica {}, before step {}{during}: {} between commits less {} of inner compute)",
                    time(stall.stall_ms),
                    stall.replica,
                    stall.step,
                    time(stall.gap_ms),
                    time(stall.inner_ms)
                ),
            )?;
        }
        let against = match self.wire.ratio {
            Some(ratio) if ratio >= 1.0 => format!(", {ratio:.1} times as much"),
            Some(_) | None => String::new(),
        };
        subject(
            f,
            "on the wire",
            &format!(
                "{} sent; data parallel would have sent {}{against}",
                bytes(self.wire.sent),
                bytes(self.wire.data_parallel)
            ),
        )?;
        if let Some(loss) = self.heldout_loss {
            let accuracy = match self.heldout_accuracy {
                Some(share) => format!(", {:.1} % right", share * 100.0),
                None => format!(" nats, {:.3} bits", loss / std::f64::consts::LN_2),
            };
            subject(f, "held-out loss", &format!("{loss:.4}{accuracy}"))?;
        }
        match &self.hash {
            Some(hash) => subject(
                f,
                "parameters",
                &format!(
                    "{} on {} (bitwise equal)",
                    hash.chars().take(16).collect::<String>(),
                    everyone(self.figures.len(), self.ranks)
                ),
            )?,
            None => subject(f, "parameters", "NOT known to be equal on all replicas")?,
        }
        if self.ok {
            return subject(f, "result", "ok");
        }
        subject(f, "result", "FAILED")?;
        for problem in &self.problems {
            writeln!(f, "  - {problem}")?;
        }
        Ok(())
    }
}

impl Report {
    fn death(&self, death: &Death) -> String {
        let at = death.t_us.saturating_sub(self.started_us) as f64 / 1e6;
        let mut text = format!(
            "replica {}{} (incarnation {}, {}) at {at:.1} s",
            death.replica,
            match self.ranks {
                1 => String::new(),
                _ => format!(", rank {}", death.rank),
            },
            death.incarnation,
            death.exit
        );
        match (death.restarted_us, death.restart_to_commit_ms) {
            (Some(restarted), Some(ms)) => {
                let pause = restarted.saturating_sub(death.t_us) as f64 / 1e3;
                text += &format!(
                    "; restarted after {}, first commit {} later",
                    time(pause),
                    time(ms)
                );
            }
            (Some(_), None) => text += "; restarted, but it never committed again",
            (None, _) => text += "; not restarted",
        }
        if let (Some(step), Some(size), Some(ms)) = (death.healed_step, death.healed_bytes, death.healed_ms) {
            text += &format!(" (healed to step {step}: {} in {})", bytes(size), time(ms));
        }
        if let Some(stall) = &death.stall {
            text += &format!("; survivors waited at most {}", time(stall.stall_ms));
            if let Some(limit) = self.stall_limit_ms {
                text += &format!(" ({} allowed)", time(limit));
            }
        }
        text
    }
}

fn everyone(n: usize, ranks: u32) -> String {
    match n {
        n if ranks > 1 => format!("all {n} ranks of all replicas"),
        1 => "the one replica".into(),
        2 => "both replicas".into(),
        n => format!("all {n} replicas"),
    }
}

/// A size in decimal units with three digits or so.
pub(crate) fn bytes(n: u64) -> String {
    let x = n as f64;
    match n {
        0..1_000 => format!("{n} B"),
        1_000..1_000_000 => format!("{:.1} kB", x / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", x / 1e6),
        _ => format!("{:.2} GB", x / 1e9),
    }
}

/// A time given in milliseconds.
fn time(ms: f64) -> String {
    if ms < 9_999.5 {
        format!("{ms:.0} ms")
    } else {
        format!("{:.1} s", ms / 1e3)
    }
}

/// Digits in groups of three.
pub(crate) fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}
