//! What a replica reports about itself.
//!
//! A [`ReplicaEvent`] travels as one JSON object on one line of at most [`MAX_LINE`] bytes, over a Unix socket from the
//! replica's `EventSender` to the supervisor. Times are microseconds of the real-time clock, so that events of
//! several processes of one machine can be laid on one axis. Non-finite figures travel as text (`"NaN"`, `"inf"`,
//! `"-inf"`), because JSON has no numbers for them and a loss that became NaN must be seen.

use std::time::{SystemTime, UNIX_EPOCH};

use ftcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The longest line that is accepted, in bytes, without the newline.
pub const MAX_LINE: usize = 16 * 1024;
/// The longest free text that is sent in an event, in bytes; longer ones are cut and end in `…`.
pub const MAX_TEXT: usize = 2 * 1024;

/// Now, in microseconds of the real-time clock (since 1970); comparable between processes of one machine.
pub fn now_us() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
}

/// What a replica is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaState {
    /// Asking for its first quorum of this incarnation.
    Joining,
    /// Computing inner steps.
    Training,
    /// Waiting for peers: for a quorum or a collective.
    Waiting,
    /// Fetching and loading the state of a peer.
    Healing,
    /// Finished its last step.
    Done,
    /// Left between two steps, because an operator told it to.
    Drained,
}

impl ReplicaState {
    /// The word that is shown to people, lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Training => "training",
            Self::Waiting => "waiting",
            Self::Healing => "healing",
            Self::Done => "done",
            Self::Drained => "drained",
        }
    }
}

/// An outer step (DiLoCo) or a step (data parallel) that was committed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Commit {
    /// The step.
    pub step: u64,
    /// The epoch (quorum id) in which it was committed.
    pub epoch: u64,
    /// Attempts at it that did not commit before.
    pub failed_attempts: u32,
    /// Replicas in the quorum.
    pub participants: u32,
    /// Replicas whose values are in the reduction.
    pub contributors: u32,
    /// Hash of the global parameters after this step, hex; equal on all replicas that committed it.
    #[serde(default)]
    pub hash: Option<String>,
    /// Inner compute since the previous `Commit` event of this incarnation, in milliseconds.
    #[serde(with = "figure")]
    pub inner_ms: f64,
    /// Time spent in this step's quorums, reductions and votes, in milliseconds.
    #[serde(with = "figure")]
    pub sync_ms: f64,
    /// Bytes written to sockets in this incarnation so far.
    pub bytes_sent: u64,
    /// Bytes read from sockets in this incarnation so far.
    pub bytes_recv: u64,
}

/// What a replica ends with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Final {
    /// The last committed step.
    pub step: u64,
    /// Hash of the global parameters, hex.
    pub hash: String,
    /// Mean loss over the held-out data with the global parameters.
    #[serde(with = "figure")]
    pub heldout_loss: f64,
    /// Share of held-out samples classified right (0..=1), where the task is a classification.
    #[serde(default, with = "optional_figure", skip_serializing_if = "Option::is_none")]
    pub heldout_accuracy: Option<f64>,
    /// Mean training loss of the last steps.
    #[serde(with = "figure")]
    pub train_loss: f64,
    /// Inner steps that this incarnation computed.
    pub inner_steps: u64,
    /// Bytes written to sockets in this incarnation.
    pub bytes_sent: u64,
    /// Bytes read from sockets in this incarnation.
    pub bytes_recv: u64,
    /// The state at the end; `Done` unless the replica was drained or gave up.
    pub state: ReplicaState,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EventKind {
    /// The process runs and has read its environment.
    Started {
        /// Its process id.
        pid: u32,
        /// The replica id under which it will join the lighthouse.
        replica_id: String,
    },
    /// It changed what it is doing.
    State {
        /// What it does now.
        state: ReplicaState,
    },
    /// One inner step was computed. The only event that may be dropped when the driver is slow.
    Step {
        /// Inner steps of the run so far, counted over incarnations (a healed replica goes on from its peer's count).
        inner_step: u64,
        /// Training loss of this step.
        #[serde(with = "figure")]
        loss: f64,
        /// Tokens (or samples) per second of this step.
        #[serde(with = "figure")]
        tokens_per_s: f64,
    },
    /// A quorum was formed.
    Quorum {
        /// Its id.
        epoch: u64,
        /// The step that it starts at.
        step: u64,
        /// How many replicas are in it.
        size: u32,
    },
    /// The reduction of a step is about to start; the process is inside it until the `Commit` that follows.
    ReduceBegin {
        /// The step.
        step: u64,
        /// The epoch.
        epoch: u64,
    },
    /// The state of a peer was loaded.
    Healed {
        /// The step of that state.
        step: u64,
        /// Its size in bytes.
        bytes: u64,
        /// Time from the start of the transfer until it was applied, in milliseconds.
        #[serde(with = "figure")]
        ms: f64,
    },
    /// A step was voted on.
    Commit(Commit),
    /// Something failed; the replica may go on.
    Error {
        /// The error, as shown to people.
        text: String,
    },
    /// The replica is finished.
    Final(Final),
}

/// One event of one incarnation of one replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaEvent {
    /// The replica's index in the job.
    pub replica: u32,
    /// Which incarnation of it: 0 for the first process, one more after each restart.
    pub incarnation: u32,
    /// The rank inside the replica that reports this.
    #[serde(default)]
    pub rank: u32,
    /// When, in microseconds of the real-time clock.
    pub t_us: u64,
    /// What happened.
    #[serde(flatten)]
    pub kind: EventKind,
}

impl ReplicaEvent {
    /// The event as one line of JSON, with the newline. Free text is cut to [`MAX_TEXT`] bytes.
    ///
    /// Fails with `InvalidArgument` if the line would still be longer than [`MAX_LINE`].
    pub fn to_line(&self) -> Result<String> {
        let mut event = self.clone();
        match &mut event.kind {
            EventKind::Error { text } => cut(text),
            EventKind::Started { replica_id, .. } => cut(replica_id),
            EventKind::Commit(Commit { hash: Some(hash), .. }) => cut(hash),
            EventKind::Final(end) => cut(&mut end.hash),
            _ => {}
        }
        encode(&event)
    }

    /// Reads one line (without its newline). A line that is no event is `Protocol`, with the start of the line.
    pub fn from_line(line: &[u8]) -> Result<Self> {
        decode(line)
    }
}

/// What travels over the socket of `OXCCL_EVENTS`: an event of a replica, or the lighthouse's address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Message {
    /// The lighthouse that the supervisor started listens.
    Lighthouse {
        /// Where.
        lighthouse_ready: LighthouseReady,
    },
    /// The supervisor's own mark: every sender that connected before it has been accepted.
    Mark {
        /// Its number.
        mark: u64,
    },
    /// What a replica reports.
    Replica(ReplicaEvent),
}

/// Sent once by a lighthouse that was started by a supervisor, as soon as it listens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LighthouseReady {
    /// Its address, `http://host:port`.
    pub url: String,
    /// Its process id.
    pub pid: u32,
}

impl Message {
    /// One line of JSON, with the newline. Errors: `InvalidArgument` if it were longer than [`MAX_LINE`].
    pub fn to_line(&self) -> Result<String> {
        encode(self)
    }

    /// Reads one line (without its newline). Errors: `Protocol`, with the start of the line.
    // Decided by the presence of a key and not by trying all, so that the error names what is wrong.
    pub fn from_line(line: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Probe {
            lighthouse_ready: Option<LighthouseReady>,
            mark: Option<u64>,
        }
        match decode::<Probe>(line)? {
            Probe {
                lighthouse_ready: Some(lighthouse_ready),
                ..
            } => Ok(Self::Lighthouse { lighthouse_ready }),
            Probe { mark: Some(mark), .. } => Ok(Self::Mark { mark }),
            Probe { .. } => Ok(Self::Replica(decode(line)?)),
        }
    }
}

fn encode(value: &impl Serialize) -> Result<String> {
    let mut line = serde_json::to_string(value)
        .map_err(|e| Error::invalid(format!("event cannot be written as JSON: {e}")).with_source(e))?;
    if line.len() > MAX_LINE {
        return Err(Error::invalid(format!(
            "event line of {} bytes is longer than the {MAX_LINE} allowed",
            line.len()
        )));
    }
    line.push('\n');
    Ok(line)
}

fn decode<T: serde::de::DeserializeOwned>(line: &[u8]) -> Result<T> {
    if line.len() > MAX_LINE {
        return Err(Error::new(
            ErrorKind::Protocol,
            format!(
                "event line of {} bytes is longer than the {MAX_LINE} allowed",
                line.len()
            ),
        ));
    }
    serde_json::from_slice(line).map_err(|e| {
        let start: String = String::from_utf8_lossy(line.get(..80.min(line.len())).unwrap_or_default())
            .chars()
            .map(|c| if c.is_control() { '.' } else { c })
            .collect();
        Error::new(
            ErrorKind::Protocol,
            format!("event line is not valid ({e}): \"{start}\""),
        )
        .with_source(e)
    })
}

/// Cuts at a character boundary, so that the text with its `…` is at most [`MAX_TEXT`] bytes.
fn cut(text: &mut String) {
    if text.len() > MAX_TEXT {
        let mut end = MAX_TEXT - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
}

/// A float as JSON; non-finite ones as text, since JSON has no numbers for them.
mod figure {
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    #[derive(Deserialize)]
    #[serde(untagged)]
    pub(super) enum Figure {
        Number(f64),
        Text(String),
    }

    impl Figure {
        pub(super) fn value<E: serde::de::Error>(self) -> Result<f64, E> {
            match self {
                Self::Number(x) => Ok(x),
                Self::Text(t) => match t.as_str() {
                    "NaN" => Ok(f64::NAN),
                    "inf" => Ok(f64::INFINITY),
                    "-inf" => Ok(f64::NEG_INFINITY),
                    _ => Err(E::custom("expected a number, \"NaN\", \"inf\" or \"-inf\"")),
                },
            }
        }
    }

    pub(super) fn serialize<S: Serializer>(x: &f64, s: S) -> Result<S::Ok, S::Error> {
        if x.is_finite() {
            s.serialize_f64(*x)
        } else {
            s.collect_str(x)
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<f64, D::Error> {
        Figure::deserialize(d)
            .map_err(|_| D::Error::custom("expected a number, \"NaN\", \"inf\" or \"-inf\""))?
            .value()
    }
}

/// The same for a figure that may be absent.
mod optional_figure {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(x: &Option<f64>, s: S) -> Result<S::Ok, S::Error> {
        match x {
            Some(x) => super::figure::serialize(x, s),
            None => s.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<f64>, D::Error> {
        Option::<super::figure::Figure>::deserialize(d)?
            .map(super::figure::Figure::value)
            .transpose()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn event(kind: EventKind) -> ReplicaEvent {
        ReplicaEvent {
            replica: 1,
            incarnation: 2,
            rank: 3,
            t_us: 1_795_000_000_000_000,
            kind,
        }
    }

    fn commit() -> Commit {
        Commit {
            step: 12,
            epoch: 7,
            failed_attempts: 0,
            participants: 2,
            contributors: 1,
            hash: Some("ab12".into()),
            inner_ms: 1234.5,
            sync_ms: 67.25,
            bytes_sent: u64::MAX,
            bytes_recv: 0,
        }
    }

    fn one_of_each() -> Vec<EventKind> {
        vec![
            EventKind::Started {
                pid: 4,
                replica_id: "replica-1:0f".into(),
            },
            EventKind::State {
                state: ReplicaState::Healing,
            },
            EventKind::Step {
                inner_step: 9,
                loss: 0.1 + 0.2,
                tokens_per_s: 1e6,
            },
            EventKind::Quorum {
                epoch: 1,
                step: 2,
                size: 3,
            },
            EventKind::ReduceBegin { step: 3, epoch: 4 },
            EventKind::Healed {
                step: 3,
                bytes: 4_000_000,
                ms: 51.5,
            },
            EventKind::Commit(commit()),
            EventKind::Commit(Commit {
                hash: None,
                failed_attempts: 3,
                ..commit()
            }),
            EventKind::Error {
                text: "line one\nline two \u{1f4a5}".into(),
            },
            EventKind::Final(Final {
                step: 30,
                hash: "ff".into(),
                heldout_loss: 1.5,
                heldout_accuracy: Some(0.96875),
                train_loss: 1.25,
                inner_steps: 300,
                bytes_sent: 1,
                bytes_recv: 2,
                state: ReplicaState::Done,
            }),
        ]
    }

    #[test]
    fn every_event_survives_the_line_and_takes_exactly_one() {
        for kind in one_of_each() {
            let e = event(kind);
            let line = e.to_line().unwrap();
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            assert!(line.ends_with('\n'));
            assert_eq!(ReplicaEvent::from_line(line.trim_end().as_bytes()).unwrap(), e);
            assert_eq!(
                Message::from_line(line.trim_end().as_bytes()).unwrap(),
                Message::Replica(e)
            );
        }
    }

    #[test]
    fn a_lighthouse_address_is_told_apart_from_an_event() {
        let ready = LighthouseReady {
            url: "http://127.0.0.1:4000".into(),
            pid: 7,
        };
        let message = Message::Lighthouse {
            lighthouse_ready: ready,
        };
        assert_eq!(
            Message::from_line(message.to_line().unwrap().trim_end().as_bytes()).unwrap(),
            message
        );
    }

    #[test]
    fn losses_that_are_not_finite_stay_visible() {
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let line = event(EventKind::Step {
                inner_step: 1,
                loss,
                tokens_per_s: 1.0,
            })
            .to_line()
            .unwrap();
            match ReplicaEvent::from_line(line.trim_end().as_bytes()).unwrap().kind {
                EventKind::Step { loss: back, .. } => assert_eq!(back.to_bits(), loss.to_bits(), "{line}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn long_text_is_cut_at_a_character_and_fits_the_line() {
        // Quotes double when they are escaped and control characters grow six times: the worst case must still fit.
        for text in [
            "ä".repeat(MAX_LINE),
            "\u{1}".repeat(MAX_LINE),
            "\"".repeat(MAX_LINE),
        ] {
            let line = event(EventKind::Error { text }).to_line().unwrap();
            assert!(line.len() <= MAX_LINE + 1, "{}", line.len());
            match ReplicaEvent::from_line(line.trim_end().as_bytes()).unwrap().kind {
                EventKind::Error { text } => assert!(text.ends_with('…') && text.len() <= MAX_TEXT),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn hostile_lines_are_protocol_errors() {
        let deep = "[".repeat(10_000);
        let long = "x".repeat(MAX_LINE + 1);
        let table: [&[u8]; 12] = [
            b"",
            b"null",
            b"{}",
            b"[1,2,3]",
            b"\xff\xfe\x00",
            b"{\"replica\":1}",
            b"{\"replica\":-1,\"incarnation\":0,\"t_us\":0,\"event\":\"state\",\"state\":\"done\"}",
            b"{\"replica\":99999999999,\"incarnation\":0,\"t_us\":0,\"event\":\"state\",\"state\":\"done\"}",
            b"{\"replica\":1,\"incarnation\":0,\"t_us\":0,\"event\":\"no_such_event\"}",
            b"{\"replica\":1,\"incarnation\":0,\"t_us\":0,\"event\":\"step\",\"inner_step\":1,\"loss\":\"many\",\"tokens_per_s\":1}",
            deep.as_bytes(),
            long.as_bytes(),
        ];
        for line in table {
            let e = Message::from_line(line).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
            assert!(e.to_string().len() < 600, "{e}");
        }
    }

    proptest! {
        #[test]
        fn any_figures_and_text_survive_the_line(
            step in any::<u64>(), replica in any::<u32>(), loss in any::<f64>(), text in ".{0,200}",
        ) {
            let a = ReplicaEvent {
                replica, incarnation: 0, rank: 0, t_us: step,
                kind: EventKind::Step { inner_step: step, loss, tokens_per_s: 0.0 },
            };
            let line = a.to_line().unwrap();
            let EventKind::Step { loss: back, inner_step, .. } =
                ReplicaEvent::from_line(line.trim_end().as_bytes()).unwrap().kind
            else {
                return Err(TestCaseError::fail("another kind came back"));
            };
            prop_assert!(back == loss || (back.is_nan() && loss.is_nan()));
            prop_assert_eq!(inner_step, step);
            let b = event(EventKind::Error { text });
            let line = b.to_line().unwrap();
            prop_assert_eq!(ReplicaEvent::from_line(line.trim_end_matches('\n').as_bytes()).unwrap(), b);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Message::from_line(&bytes);
        }
    }
}
