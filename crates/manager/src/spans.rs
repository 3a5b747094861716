//! The steps of this rank as OpenTelemetry spans (feature `otel`): one for each attempt at a step, and in it one for the quorum, each
//! configuration of the group, each heal and the vote. They go to the tracer provider that the program has installed
//! (`opentelemetry::global`); without one they go nowhere.
//!
//! A span is made when what it stands for has ended, with the time that was measured for the event log. Without the feature nothing is made.

#[cfg(feature = "otel")]
pub(crate) use made::Spans;
#[cfg(not(feature = "otel"))]
pub(crate) use none::Spans;

#[cfg(not(feature = "otel"))]
mod none {
    use std::time::Duration;

    use crate::event_log::Event;

    pub(crate) struct Spans;

    impl Spans {
        pub(crate) fn new(_replica_id: &str, _rank: u32) -> Self {
            Self
        }

        pub(crate) fn is_on(&self) -> bool {
            false
        }

        pub(crate) fn see(&self, _event: &Event<'_>) {}

        pub(crate) fn voted(&self, _took: Duration) {}
    }
}

#[cfg(feature = "otel")]
mod made {
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, SystemTime};

    use opentelemetry::trace::{Span as _, SpanBuilder, Status, TraceContextExt as _, Tracer as _};
    use opentelemetry::{Array, Context, KeyValue, StringValue, Value, global};

    use crate::event_log::Event;

    /// The instrumentation scope of all spans.
    const SCOPE: &str = "oxccl";

    pub(crate) struct Spans {
        replica_id: String,
        rank: u32,
        /// The span of the attempt that has begun and not ended.
        attempt: Mutex<Option<Context>>,
    }

    fn integer(name: &'static str, value: impl TryInto<i64>) -> KeyValue {
        KeyValue::new(name, value.try_into().unwrap_or(i64::MAX))
    }

    fn texts(name: &'static str, values: &[&str]) -> KeyValue {
        let values = values.iter().map(|v| StringValue::from((*v).to_string()));
        KeyValue::new(name, Value::Array(Array::String(values.collect())))
    }

    fn status(error: Option<&str>) -> Status {
        error.map_or(Status::Ok, |reason| Status::error(reason.to_string()))
    }

    impl Spans {
        pub(crate) fn new(replica_id: &str, rank: u32) -> Self {
            Self {
                replica_id: replica_id.to_string(),
                rank,
                attempt: Mutex::new(None),
            }
        }

        pub(crate) fn is_on(&self) -> bool {
            true
        }

        fn attempt(&self) -> MutexGuard<'_, Option<Context>> {
            self.attempt.lock().unwrap_or_else(PoisonError::into_inner)
        }

        /// The attempt that goes on; without one it began `took` ago.
        fn current(&self, took: f64) -> Context {
            let mut attempt = self.attempt();
            let begun = || {
                let attributes = vec![
                    KeyValue::new("oxccl.replica_id", self.replica_id.clone()),
                    integer("oxccl.rank", self.rank),
                ];
                let span = SpanBuilder::from_name("step")
                    .with_start_time(ago(took))
                    .with_attributes(attributes);
                let span = global::tracer(SCOPE).build_with_context(span, &Context::new());
                Context::new().with_span(span)
            };
            attempt.get_or_insert_with(begun).clone()
        }

        /// A part of the attempt that ends now.
        fn part(&self, name: &'static str, took: f64, attributes: Vec<KeyValue>, error: Option<&str>) {
            let attempt = self.current(took);
            let part = SpanBuilder::from_name(name)
                .with_start_time(ago(took))
                .with_attributes(attributes);
            let mut part = global::tracer(SCOPE).build_with_context(part, &attempt);
            part.set_status(status(error));
            part.end();
        }

        /// The attempt is over.
        fn end(&self, epoch: i64, step: i64, more: Option<KeyValue>, error: Option<&str>) {
            let Some(attempt) = self.attempt().take() else {
                return;
            };
            let span = attempt.span();
            span.set_attribute(integer("oxccl.epoch", epoch));
            span.set_attribute(integer("oxccl.step", step));
            if let Some(more) = more {
                span.set_attribute(more);
            }
            span.set_status(status(error));
            span.end();
        }

        /// An event inside the attempt that goes on, if one does.
        fn note(&self, name: &'static str, attributes: Vec<KeyValue>) {
            if let Some(attempt) = &*self.attempt() {
                attempt.span().add_event(name, attributes);
            }
        }

        pub(crate) fn see(&self, event: &Event<'_>) {
            match event {
                Event::Start { .. } | Event::Dropped { .. } => {}
                Event::Quorum {
                    epoch,
                    step,
                    replica_rank,
                    size,
                    heal,
                    spare,
                    members,
                    took_s,
                } => {
                    let attributes = vec![
                        integer("oxccl.epoch", *epoch),
                        integer("oxccl.step", *step),
                        integer("oxccl.replica_rank", *replica_rank),
                        integer("oxccl.replica_world_size", *size),
                        KeyValue::new("oxccl.heal", *heal),
                        KeyValue::new("oxccl.spare", *spare),
                        texts("oxccl.members", members),
                    ];
                    self.part("quorum", *took_s, attributes, None);
                }
                Event::Configure { epoch, took_s, error } => {
                    self.part("configure", *took_s, vec![integer("oxccl.epoch", *epoch)], *error);
                }
                Event::Heal {
                    epoch,
                    step,
                    from,
                    bytes,
                    took_s,
                    error,
                } => {
                    let attributes = vec![
                        integer("oxccl.epoch", *epoch),
                        integer("oxccl.step", *step),
                        texts("oxccl.sources", from),
                        integer("oxccl.bytes", *bytes),
                    ];
                    self.part("heal", *took_s, attributes, *error);
                }
                Event::Commit {
                    epoch,
                    step,
                    contributors,
                    ..
                } => {
                    let contributors = integer("oxccl.contributors", *contributors);
                    self.end(*epoch, *step, Some(contributors), None);
                }
                Event::Discard {
                    epoch, step, reason, ..
                } => self.end(*epoch, *step, None, Some(reason)),
                Event::Failure { reason, .. } => {
                    self.note("failure", vec![KeyValue::new("reason", reason.to_string())]);
                }
                Event::Abort { reason, .. } => {
                    self.note("abort", vec![KeyValue::new("reason", reason.to_string())]);
                }
                Event::MemberLost { member, reason, .. } => {
                    let attributes = vec![
                        KeyValue::new("member", member.to_string()),
                        KeyValue::new("reason", reason.to_string()),
                    ];
                    self.note("member_lost", attributes);
                }
                Event::End { error, .. } => {
                    if let Some(attempt) = self.attempt().take() {
                        let span = attempt.span();
                        span.set_status(status(error.or(Some("the run ended in this attempt"))));
                        span.end();
                    }
                }
            }
        }

        pub(crate) fn voted(&self, took: Duration) {
            self.part("vote", took.as_secs_f64(), Vec::new(), None);
        }
    }

    fn ago(seconds: f64) -> SystemTime {
        let now = SystemTime::now();
        Duration::try_from_secs_f64(seconds)
            .ok()
            .and_then(|took| now.checked_sub(took))
            .unwrap_or(now)
    }
}
