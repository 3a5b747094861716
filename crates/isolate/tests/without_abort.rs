//! The one suite over an isolated backend that can neither abort nor be configured again nor tell mismatches, as vendor libraries
//! are: a gloo that hides these. What the suite asks of abort and reconfigure comes from isolation alone.
//!
//! A stand-in for such a library; the real ones have rows of their own.

mod suite;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use backend_gloo::{GlooFactory, GlooGroup};
use ftcore::registry::{BackendFactory, StaticBackend};
use ftcore::{
    Capabilities, Checked, Completion, Configuration, Device, Error, ErrorKind, Failed, Feature,
    GroupOptions, ProcessGroup, Rejected, Result, SubmitOptions, Work, Wrapper,
};

struct Mute {
    gloo: GlooGroup,
    capabilities: Capabilities,
    configured: std::sync::atomic::AtomicBool,
}

fn muted(mut capabilities: Capabilities) -> Capabilities {
    for feature in [
        Feature::Abort,
        Feature::Reconfigure,
        Feature::MismatchDetection,
        Feature::Split,
    ] {
        capabilities.features = capabilities.features.without(feature);
    }
    capabilities
}

impl Wrapper for Mute {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.gloo
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn configure(&self, configuration: Configuration) -> Result<()> {
        if self.configured.swap(true, std::sync::atomic::Ordering::SeqCst) {
            return Err(Error::new(
                ErrorKind::InvalidState,
                "one configuration per process",
            ));
        }
        self.gloo.configure(configuration)
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.gloo.submit(op, options)
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        self.gloo.execute(op, options)
    }

    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Err(Error::unsupported("no split"))
    }

    fn abort(&self, _: &str) {}
}

struct MuteFactory;

impl BackendFactory for MuteFactory {
    fn probe(&self) -> Result<()> {
        GlooFactory.probe()
    }
    fn capabilities(&self) -> Capabilities {
        muted(GlooFactory.capabilities())
    }
    fn create(&self, _: &Device, options: &GroupOptions) -> Result<Box<dyn ProcessGroup>> {
        let gloo = GlooGroup::new("mute", options.clone())?;
        Ok(Box::new(Mute {
            capabilities: muted(gloo.capabilities().clone()),
            gloo,
            configured: Default::default(),
        }))
    }
}

ftcore::inventory::submit! {
    StaticBackend {
        name: "mute",
        device: "cpu",
        origin: "tests",
        version: "1",
        factory: || Arc::new(MuteFactory),
    }
}

fn main() -> ExitCode {
    suite::run("mute")
}
