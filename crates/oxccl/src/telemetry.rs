//! OpenTelemetry: the steps of this process's managers as spans, and their way to a receiver.
//!
//! A manager makes a span for each attempt at a step, and in it one for the quorum, each configuration of the group, each heal and the vote.
//! It gives them to the tracer provider that the program has installed. A program that has none of its own calls [`install`].

use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, Result};
use opentelemetry::global;
use opentelemetry_otlp::{
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, SpanExporter, WithExportConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Runtime;

const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";

/// Sends spans until it is shut down. Spans that wait when it is dropped instead are lost.
pub struct Telemetry {
    provider: SdkTracerProvider,
    /// What the connection to the receiver runs on.
    runtime: Option<Runtime>,
}

impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Telemetry").finish_non_exhaustive()
    }
}

/// Installs a tracer provider for the whole process that sends spans by OTLP over gRPC to the address in `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or
/// `OTEL_EXPORTER_OTLP_ENDPOINT` (such as `http://127.0.0.1:4317`). None if neither is set: nothing is installed then. `OTEL_SERVICE_NAME`
/// (`oxccl` without it), `OTEL_RESOURCE_ATTRIBUTES` and the variables of OpenTelemetry's batch processor and exporter hold as well.
///
/// A receiver that is away or slow costs spans, never a step.
///
/// ```no_run
/// # fn main() -> oxccl::core::Result<()> {
/// let telemetry = oxccl::telemetry::install()?;
/// // … training …
/// if let Some(telemetry) = telemetry {
///     telemetry.shutdown(oxccl::core::deadline_in(std::time::Duration::from_secs(5)))?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Errors: `InvalidArgument` if a variable's value is none that OpenTelemetry knows; `Io` if threads cannot be started.
pub fn install() -> Result<Option<Telemetry>> {
    let named = |name: &str| std::env::var(name).is_ok_and(|value| !value.is_empty());
    if !named(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) && !named(OTEL_EXPORTER_OTLP_ENDPOINT) {
        return Ok(None);
    }
    let exporter = SpanExporter::builder().with_tonic();
    start(exporter).map(Some)
}

/// [`install`] for the receiver at `endpoint`, whatever the variables say of it.
///
/// Errors: as [`install`].
pub fn install_to(endpoint: &str) -> Result<Telemetry> {
    start(SpanExporter::builder().with_tonic().with_endpoint(endpoint))
}

fn start(
    exporter: opentelemetry_otlp::SpanExporterBuilder<opentelemetry_otlp::TonicExporterBuilderSet>,
) -> Result<Telemetry> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("ox-telemetry")
        .enable_all()
        .build()
        .map_err(|e| Error::io("start the threads of the telemetry", e))?;
    let exporter = {
        let _entered = runtime.enter();
        exporter
            .build()
            .map_err(|e| Error::invalid(format!("the OpenTelemetry exporter cannot be made: {e}")))?
    };
    let mut resource = Resource::builder();
    if std::env::var_os(SERVICE_NAME).is_none() {
        resource = resource.with_service_name("oxccl");
    }
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource.build())
        .build();
    global::set_tracer_provider(provider.clone());
    Ok(Telemetry {
        provider,
        runtime: Some(runtime),
    })
}

impl Telemetry {
    /// Sends the spans that wait, until `deadline`, and stops.
    ///
    /// Errors: `Io` if they could not be sent (by then).
    pub fn shutdown(self, deadline: Instant) -> Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        let sent = self
            .provider
            .shutdown_with_timeout(left.max(Duration::from_millis(1)));
        sent.map_err(|e| {
            Error::new(
                ErrorKind::Io,
                format!("the last spans were not sent to the OpenTelemetry receiver: {e}"),
            )
        })
    }
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
