//! Log events of this dylib, handed to the host: `tracing` state does not cross a dylib boundary by itself.

use std::fmt::Write as _;
use std::sync::OnceLock;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::abi;
use crate::text;

struct HostLog(abi::Host);

// SAFETY: the ABI says that the host lives as long as the process and may be called from any thread.
unsafe impl Send for HostLog {}
// SAFETY: as above.
unsafe impl Sync for HostLog {}

static HOST: OnceLock<HostLog> = OnceLock::new();

/// From now on every event goes to the host. A subscriber that the plugin has set itself stays.
pub(super) fn install(host: abi::Host) {
    if HOST.set(HostLog(host)).is_ok() {
        drop(tracing::subscriber::set_global_default(Forward));
    }
}

fn code(level: Level) -> u32 {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        _ => 5,
    }
}

struct Forward;

/// The event's message, then its fields.
#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            let fields = std::mem::take(&mut self.0);
            let _ = write!(self.0, "{value:?}{fields}");
        } else {
            let _ = write!(self.0, " {}={value:?}", field.name());
        }
    }
}

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let Some(host) = HOST.get() else { return false };
        match host.0.log_level {
            // SAFETY: the host's own function.
            Some(level) => code(*metadata.level()) <= unsafe { level(host.0.ctx) },
            None => true,
        }
    }

    fn register_callsite(&self, _metadata: &'static Metadata<'static>) -> tracing::subscriber::Interest {
        // What the host reads may change at any time.
        tracing::subscriber::Interest::sometimes()
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        None
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let Some((host, log)) = HOST.get().and_then(|h| Some((h, h.0.log?))) else {
            return;
        };
        let mut line = Line::default();
        event.record(&mut line);
        let (level, target) = (code(*event.metadata().level()), event.metadata().target());
        // SAFETY: the host's own function; both texts live for the call.
        unsafe {
            log(
                host.0.ctx,
                level,
                text::lend(target),
                text::lend(line.0.trim_start()),
            )
        }
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}
