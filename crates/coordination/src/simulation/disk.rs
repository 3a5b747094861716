//! A disk that outlives the lighthouse that writes to it: the record as text, as the state file has it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ftcore::{Error, ErrorKind, Result};
use protocol::quorum::Record;

use super::Host;
use crate::lighthouse::saved;

const PLACE: &str = "the simulated disk";

/// The disk as one run of a lighthouse sees it.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    plate: Plate,
    writer: Host,
    unsaved: Arc<Mutex<Option<Record>>>,
}

/// What stays.
#[derive(Debug, Clone, Default)]
pub(super) struct Plate(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    text: Option<Vec<u8>>,
    is_full: bool,
}

impl Plate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_full(&self, is_full: bool) {
        self.state().is_full = is_full;
    }

    pub(super) fn record(&self) -> Option<Record> {
        self.state()
            .text
            .as_deref()
            .map(|text| saved::decode(text, PLACE).expect("what was saved is read again"))
    }

    pub(super) fn of(&self, writer: Host) -> Disk {
        Disk {
            plate: self.clone(),
            writer,
            unsaved: Arc::default(),
        }
    }
}

impl Disk {
    pub(crate) fn keep(&self, record: &Record) {
        *self.unsaved.lock().unwrap_or_else(PoisonError::into_inner) = Some(record.clone());
        let _ = self.written();
    }

    pub(crate) fn written(&self) -> Result<()> {
        let mut unsaved = self.unsaved.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(record) = unsaved.as_ref() else {
            return Ok(());
        };
        let mut state = self.plate.state();
        // What is left of a killed process writes nothing.
        if state.is_full || !self.writer.is_up() {
            return Err(Error::new(ErrorKind::Unavailable, "the simulated disk is full"));
        }
        state.text = Some(saved::encode(record, PLACE)?);
        *unsaved = None;
        Ok(())
    }
}
