//! Which snapshots are on offer, and to whom.
//!
//! `published` is open to every reader. A retired snapshot that still has readers moves to `lingering`: its chunks are
//! served on, its manifest is not, and it goes when its last reader disconnects or two newer ones linger. A reader is a
//! connection that holds a [`Pin`]; pins do not own the snapshot, so a reader that never ends cannot keep
//! memory that the table has given up.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blake3::Hash;
use tokio::sync::watch;

use crate::Snapshot;

const MAX_PUBLISHED: usize = 2;
const MAX_LINGERING: usize = 2;

#[derive(Debug)]
struct Entry {
    snapshot: Arc<Snapshot>,
    /// One reference here, one in every pin.
    readers: Arc<()>,
}

impl Entry {
    fn has_readers(&self) -> bool {
        Arc::strong_count(&self.readers) > 1
    }

    fn is(&self, step: i64, digest: Option<Hash>) -> bool {
        self.snapshot.step() == step && digest.is_none_or(|d| self.snapshot.known_digest() == Some(d))
    }
}

#[derive(Debug, Default)]
struct Table {
    /// Oldest publication first.
    published: VecDeque<Entry>,
    lingering: VecDeque<Entry>,
    /// The step published last, even if it was retired since.
    last_step: Option<i64>,
    closed: bool,
}

impl Table {
    fn linger(&mut self, entry: Entry, freed: &mut Vec<Entry>) {
        self.lingering.push_back(entry);
        self.sweep(freed);
    }

    fn sweep(&mut self, freed: &mut Vec<Entry>) {
        let (keep, gone) = std::mem::take(&mut self.lingering)
            .into_iter()
            .partition(Entry::has_readers);
        self.lingering = keep;
        freed.extend::<VecDeque<_>>(gone);
        while self.lingering.len() > MAX_LINGERING {
            freed.extend(self.lingering.pop_front());
        }
    }
}

/// The mark of a reader: while it lives, the snapshot may linger.
#[derive(Debug)]
pub(super) struct Pin(#[allow(dead_code)] Arc<()>);

/// What a request for a step gets.
#[derive(Debug)]
pub(super) enum Lookup {
    Found(Arc<Snapshot>, Pin),
    /// Not published yet; the text is for the case that the wait ends first.
    NotYet(String),
    /// Will not come.
    Other(String),
    Closed,
}

/// What part of a snapshot is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Manifest,
    /// A chunk by index; with the digest of its manifest, if the reader says which.
    Chunk(usize, Option<Hash>),
}

/// The table with its lock, and the signal that it changed.
#[derive(Debug)]
pub(super) struct Serving {
    table: Mutex<Table>,
    changed: watch::Sender<u64>,
}

impl Default for Serving {
    fn default() -> Self {
        Self {
            table: Mutex::default(),
            changed: watch::channel(0).0,
        }
    }
}

impl Serving {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change of the table is complete before anything that could panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table, frees what fell out of it after the lock is released, and wakes those who wait.
    fn change<T>(&self, f: impl FnOnce(&mut Table, &mut Vec<Entry>) -> T) -> T {
        let mut freed = Vec::new();
        let result = f(&mut self.table(), &mut freed);
        drop(freed);
        self.changed.send_modify(|n| *n = n.wrapping_add(1));
        result
    }

    /// False if the server was closed.
    pub(super) fn publish(&self, snapshot: Arc<Snapshot>) -> bool {
        self.change(|table, freed| {
            if table.closed {
                return false;
            }
            table.last_step = Some(snapshot.step());
            if let Some(at) = table
                .published
                .iter()
                .position(|e| e.snapshot.step() == snapshot.step())
                && let Some(old) = table.published.remove(at)
            {
                if Arc::ptr_eq(&old.snapshot, &snapshot) {
                    table.published.push_back(old);
                    return true;
                }
                table.linger(old, freed);
            }
            table.published.push_back(Entry {
                snapshot,
                readers: Arc::new(()),
            });
            while table.published.len() > MAX_PUBLISHED {
                if let Some(old) = table.published.pop_front() {
                    table.linger(old, freed);
                }
            }
            true
        })
    }

    pub(super) fn retire(&self) {
        self.change(|table, freed| {
            for old in std::mem::take(&mut table.published) {
                table.linger(old, freed);
            }
        });
    }

    /// No more readers at all; those in the middle of a snapshot are served on until the server stops.
    pub(super) fn close(&self) {
        self.change(|table, freed| {
            table.closed = true;
            for old in std::mem::take(&mut table.published) {
                table.linger(old, freed);
            }
        });
    }

    pub(super) fn published_steps(&self) -> Vec<i64> {
        self.table().published.iter().map(|e| e.snapshot.step()).collect()
    }

    /// A signal for every change from now on.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Frees lingering snapshots whose readers are gone; called when a connection ends.
    pub(super) fn sweep(&self) {
        let mut freed = Vec::new();
        self.table().sweep(&mut freed);
    }

    pub(super) fn lookup(&self, step: i64, part: Part) -> Lookup {
        let table = self.table();
        let found = match part {
            Part::Manifest => table.published.iter().rev().find(|e| e.is(step, None)),
            Part::Chunk(_, digest) => {
                let all = table.published.iter().rev().chain(table.lingering.iter().rev());
                all.into_iter().find(|e| e.is(step, digest))
            }
        };
        if let Some(entry) = found {
            return Lookup::Found(Arc::clone(&entry.snapshot), Pin(Arc::clone(&entry.readers)));
        }
        if table.closed {
            return Lookup::Closed;
        }
        let newest = table.published.back().map(|e| e.snapshot.step());
        let text = match newest {
            Some(s) => format!("serving step {s}, asked for {step}"),
            None => format!("serving no step, asked for {step}"),
        };
        let may_come = match (newest, table.last_step, part) {
            // The reader names a snapshot that it has seen: it was replaced or retired, and will not come back.
            (_, _, Part::Chunk(_, Some(_))) => false,
            (Some(newest), ..) => step > newest,
            // A step whose commit failed is published again in the next epoch.
            (None, Some(last), _) => step >= last,
            (None, None, _) => true,
        };
        if may_come {
            Lookup::NotYet(text)
        } else {
            Lookup::Other(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StateDict;

    fn snapshot(step: i64) -> Arc<Snapshot> {
        Snapshot::new(step, 1, &StateDict::new()).unwrap()
    }

    fn pin(s: &Serving, step: i64) -> Pin {
        match s.lookup(step, Part::Manifest) {
            Lookup::Found(_, pin) => pin,
            other => panic!("step {step}: {other:?}"),
        }
    }

    fn text(s: &Serving, step: i64) -> String {
        match s.lookup(step, Part::Manifest) {
            Lookup::NotYet(t) => format!("wait: {t}"),
            Lookup::Other(t) => t,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn the_newest_two_are_offered_older_ones_refused_and_newer_ones_awaited() {
        let s = Serving::default();
        assert_eq!(text(&s, 0), "wait: serving no step, asked for 0");
        for step in [3, 4, 5] {
            assert!(s.publish(snapshot(step)));
        }
        assert_eq!(s.published_steps(), [4, 5]);
        assert_eq!(text(&s, 3), "serving step 5, asked for 3");
        assert_eq!(text(&s, 6), "wait: serving step 5, asked for 6");
        s.retire();
        assert_eq!(text(&s, 4), "serving no step, asked for 4");
        assert_eq!(text(&s, 5), "wait: serving no step, asked for 5");
    }

    #[test]
    fn l29_unread_snapshots_are_freed_at_once_and_readers_keep_at_most_two_retired_ones() {
        let s = Serving::default();
        let alive = |w: &std::sync::Weak<Snapshot>| w.strong_count() > 0;
        let mut weak = Vec::new();
        let mut pins = Vec::new();
        for step in 0..6 {
            let snap = snapshot(step);
            weak.push(Arc::downgrade(&snap));
            s.publish(snap);
            if step < 5 {
                pins.push(pin(&s, step));
            }
            s.retire();
        }
        // Step 5 had no reader; 0 to 2 have readers that never end, but newer ones linger.
        assert_eq!(
            weak.iter().map(alive).collect::<Vec<_>>(),
            [false, false, false, true, true, false]
        );
        assert!(matches!(s.lookup(4, Part::Chunk(0, None)), Lookup::Found(..)));
        assert!(!matches!(s.lookup(4, Part::Manifest), Lookup::Found(..)));
        pins.clear();
        s.sweep();
        assert!(weak.iter().all(|w| !alive(w)));
    }

    #[test]
    fn a_step_published_anew_is_not_mixed_up_with_the_old_one() {
        let s = Serving::default();
        let old = snapshot(7);
        let digest = old.manifest().digest();
        s.publish(Arc::clone(&old));
        let reader = pin(&s, 7);
        let new = Snapshot::new(7, 2, &StateDict::new()).unwrap();
        s.publish(Arc::clone(&new));
        assert_eq!(s.published_steps(), [7]);
        let Lookup::Found(found, _) = s.lookup(7, Part::Chunk(0, Some(digest))) else {
            panic!("old is gone")
        };
        assert!(Arc::ptr_eq(&found, &old));
        let Lookup::Found(found, _) = s.lookup(7, Part::Manifest) else {
            panic!("new is not there")
        };
        assert!(Arc::ptr_eq(&found, &new));
        drop(reader);
        s.sweep();
        assert!(matches!(
            s.lookup(7, Part::Chunk(0, Some(digest))),
            Lookup::Other(_)
        ));
    }

    #[test]
    fn a_closed_table_takes_nothing_more() {
        let s = Serving::default();
        s.publish(snapshot(1));
        s.close();
        assert!(!s.publish(snapshot(2)));
        assert!(matches!(s.lookup(1, Part::Manifest), Lookup::Closed));
    }
}
