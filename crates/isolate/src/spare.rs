//! A child that is ready before it is needed: started in the background, with its backend loaded.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::engine::spawn;
use ftcore::{Cancel, Error, ErrorKind, deadline_in, time_left};

use crate::child_pool;
use crate::link::Link;
use crate::options::IsolateOptions;
use crate::pool::Pool;

#[derive(Default)]
enum Place {
    #[default]
    Empty,
    Starting,
    Ready(Arc<Link>),
    /// The group is gone; a child that comes is ended.
    Closed,
}

/// The place for one spare child.
#[derive(Default)]
pub(crate) struct Spare {
    place: Mutex<Place>,
    changed: Condvar,
}

impl Spare {
    /// Starts one in the background, unless one is there or on its way. Never blocks.
    pub(crate) fn prepare(self: &Arc<Self>, options: &IsolateOptions, pool: &Arc<Pool>) {
        {
            let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
            match &*place {
                Place::Empty => *place = Place::Starting,
                Place::Ready(link) if !link.is_fresh() => *place = Place::Starting,
                _ => return,
            }
        }
        let (this, options, pool) = (self.clone(), options.clone(), pool.clone());
        let started = spawn("ox-ispare", move || {
            let until = deadline_in(options.start_timeout);
            let link = match child_pool::start(&options, &pool, until, &Cancel::default()) {
                Ok(started) => Some(started.link),
                Err(error) => {
                    tracing::warn!(backend = options.backend, %error, "no spare child could be started");
                    None
                }
            };
            this.arrived(link);
        });
        if let Err(error) = started {
            tracing::warn!(%error, "no thread for starting a spare child");
            self.arrived(None);
        }
    }

    fn arrived(&self, link: Option<Arc<Link>>) {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Place::Closed = &*place {
            drop(place);
            if let Some(link) = link {
                dismiss(&link);
            }
            return;
        }
        *place = link.map_or(Place::Empty, Place::Ready);
        drop(place);
        self.changed.notify_all();
    }

    /// The spare, if there is one; one that is on its way is waited for until `deadline`, or until it is
    /// cancelled.
    pub(crate) fn take(&self, deadline: Instant, cancel: &Cancel) -> Option<Arc<Link>> {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*place {
                Place::Empty | Place::Closed => return None,
                Place::Ready(_) => {
                    let Place::Ready(link) = std::mem::take(&mut *place) else {
                        return None;
                    };
                    return link.is_fresh().then_some(link);
                }
                Place::Starting => {
                    let left = time_left(deadline);
                    if left.is_zero() || cancel.reason().is_some() {
                        return None;
                    }
                    place = self
                        .changed
                        .wait_timeout(place, left.min(Cancel::TURN))
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
            }
        }
    }

    /// The process id of the spare that is ready.
    pub(crate) fn pid(&self) -> Option<u32> {
        match &*self.place.lock().unwrap_or_else(PoisonError::into_inner) {
            Place::Ready(link) if link.is_fresh() => Some(link.pid.as_raw_nonzero().get().cast_unsigned()),
            _ => None,
        }
    }

    /// Ends the spare and any that is on its way. Never blocks.
    pub(crate) fn close(&self) {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Place::Ready(link) = std::mem::replace(&mut *place, Place::Closed) {
            dismiss(&link);
        }
    }
}

fn dismiss(link: &Link) {
    let error = Error::new(ErrorKind::Aborted, "the spare child is not needed any more");
    link.end(error, None, Duration::ZERO);
}
