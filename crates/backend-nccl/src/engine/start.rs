//! How an engine comes up: control connections, stream, watchdog.

use std::sync::{Arc, Condvar, Mutex, Weak};

use ftcore::{Configuration, Error, Result};

use super::{Counters, Engine, Place, lock};
use crate::control::{Control, Listener};
use crate::cuda::gpu::Gpu;
use crate::cuda::stream::CudaStream;
use crate::lanes::Lanes;
use crate::options::Settings;
use crate::raw::{Comm, give_up};
use crate::{threads, watch};

/// Everything an engine is made of.
pub(crate) struct Ingredients {
    pub(crate) place: Place,
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) comm: Arc<Comm>,
    pub(crate) settings: Settings,
    pub(crate) configuration: Configuration,
    pub(crate) counters: Arc<Counters>,
    pub(crate) streams: Vec<(u32, std::net::TcpStream)>,
}

impl Engine {
    /// Starts the control connections and the watchdog. If one of them does not start, the others are told, and the communicator is ended.
    pub(crate) fn start(i: Ingredients) -> Result<Arc<Self>> {
        let comm = i.comm.clone();
        Self::begin(i).inspect_err(|_| give_up(comm))
    }

    fn begin(i: Ingredients) -> Result<Arc<Self>> {
        let heard: Arc<Mutex<Weak<Self>>> = Arc::default();
        let to = heard.clone();
        let listener: Listener = Arc::new(move |news| {
            if let Some(engine) = lock(&to).upgrade() {
                engine.hear(news);
            }
        });
        // News that comes before the engine stands waits for this lock.
        let mut gate = lock(&heard);
        let control = if i.place.world > 1 {
            Some(Control::start(
                i.place.rank,
                i.place.world,
                i.streams,
                listener.clone(),
            )?)
        } else {
            None
        };
        let tell = |error: &Error| {
            if let Some(control) = &control {
                control.fail(error);
            }
        };
        let stream = CudaStream::new(&i.gpu, i.settings.high_priority).inspect_err(tell)?;
        let engine = Arc::new(Self {
            place: i.place,
            gpu: i.gpu,
            comm: i.comm,
            stream,
            settings: i.settings,
            configuration: i.configuration,
            counters: i.counters,
            lanes: Lanes::default(),
            control: control.clone(),
            listener,
            order: Mutex::default(),
            state: Mutex::default(),
            moved: Condvar::new(),
        });
        *gate = Arc::downgrade(&engine);
        drop(gate);
        let watched = engine.clone();
        threads::start("ox-nccl-watch", move || watch::run(&watched)).inspect_err(tell)?;
        Ok(engine)
    }
}
