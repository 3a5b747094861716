//! Who is connected, and who goes when there is no room for another: the connection that has been without a request for longest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The connections of a server.
#[derive(Debug)]
pub(super) struct Guests {
    most: usize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    open: usize,
    next: u64,
    /// Those without a request: first those that have not proved to be members, then the ones that have been so for longest.
    idle: BTreeMap<(bool, u64), Arc<Notify>>,
}

impl Guests {
    /// Room for `most` connections.
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            table: Mutex::default(),
        })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection, if need be that of an idle one; `None` if none is idle. `member`: it need not prove that it is one.
    pub(super) fn admit(self: &Arc<Self>, member: bool) -> Option<Guest> {
        let mut table = self.table();
        if table.open >= self.most {
            let (_, longest) = table.idle.pop_first()?;
            longest.notify_one();
            // It gives its place up a little later, as it ends.
        }
        table.open += 1;
        drop(table);
        let slot = Slot {
            guests: Arc::clone(self),
            state: Mutex::new(State {
                member,
                ..State::default()
            }),
            go: Arc::default(),
        };
        slot.rest();
        Some(Guest(Arc::new(slot)))
    }

    #[cfg(test)]
    fn open(&self) -> usize {
        self.table().open
    }
}

#[derive(Debug, Default)]
struct State {
    member: bool,
    /// Its place among the idle.
    idle: Option<(bool, u64)>,
    requests: u64,
    /// Answers that are not gone yet.
    open: usize,
}

/// The place of one connection, given up once it and its last answer are dropped.
#[derive(Debug)]
pub(super) struct Guest(Arc<Slot>);

#[derive(Debug)]
struct Slot {
    guests: Arc<Guests>,
    state: Mutex<State>,
    go: Arc<Notify>,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has no request, or one less.
    fn rest(&self) {
        let mut state = self.state();
        state.open = state.open.saturating_sub(1);
        if state.open > 0 {
            return;
        }
        let mut table = self.guests.table();
        let place = (state.member, table.next);
        table.next += 1;
        table.idle.insert(place, Arc::clone(&self.go));
        state.idle = Some(place);
    }
}

impl Guest {
    /// It has proved to be a member.
    pub(super) fn is_member(&self) {
        let mut state = self.0.state();
        state.member = true;
        if let Some(place) = state.idle.take() {
            self.0.guests.table().idle.remove(&place);
        }
        drop(state);
        self.0.rest();
    }

    /// A request has come, until the guard is dropped with the last byte of its answer.
    pub(super) fn busy(&self) -> Busy {
        let mut state = self.0.state();
        state.requests += 1;
        state.open += 1;
        if let Some(number) = state.idle.take() {
            self.0.guests.table().idle.remove(&number);
        }
        Busy(Arc::clone(&self.0))
    }

    /// True once there was a request.
    pub(super) fn greeted(&self) -> bool {
        self.0.state().requests > 0
    }

    /// Ready once another connection needs the place.
    pub(super) async fn asked_to_go(&self) {
        self.0.go.notified().await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let idle = self.state().idle.take();
        let mut table = self.guests.table();
        if let Some(number) = idle {
            table.idle.remove(&number);
        }
        table.open = table.open.saturating_sub(1);
    }
}

/// A connection with a request.
#[derive(Debug)]
pub(super) struct Busy(Arc<Slot>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_asked(guest: &Guest) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = guest.asked_to_go() => true,
                () = std::future::ready(()) => false,
            }
        })
    }

    #[test]
    fn who_was_idle_for_longest_makes_room_and_who_is_busy_never_does() {
        let guests = Guests::new(3);
        let (a, b, c) = (
            guests.admit(true).unwrap(),
            guests.admit(true).unwrap(),
            guests.admit(true).unwrap(),
        );
        // The first two ask; the first one rests again, later than the third came.
        drop(a.busy());
        let busy = b.busy();
        assert!(a.greeted() && b.greeted() && !c.greeted());
        let d = guests.admit(true).unwrap();
        assert!(is_asked(&c) && !is_asked(&a) && !is_asked(&b));
        drop(c);
        let busy_too = (a.busy(), d.busy());
        assert!(guests.admit(true).is_none(), "all are in the middle of something");
        drop(busy);
        let e = guests.admit(true).unwrap();
        assert!(is_asked(&b) && !is_asked(&a) && !is_asked(&d));
        drop(busy_too);
        drop((a, b, d, e));
        assert_eq!(guests.open(), 0);
        assert!(guests.table().idle.is_empty());
    }

    #[test]
    fn one_that_has_proved_nothing_makes_room_before_any_member_does() {
        let guests = Guests::new(3);
        let (a, b, c) = (
            guests.admit(false).unwrap(),
            guests.admit(false).unwrap(),
            guests.admit(false).unwrap(),
        );
        a.is_member();
        b.is_member();
        let d = guests.admit(false).unwrap();
        assert!(is_asked(&c) && !is_asked(&a) && !is_asked(&b));
        drop(c);
        d.is_member();
        let e = guests.admit(false).unwrap();
        assert!(is_asked(&a) && !is_asked(&b) && !is_asked(&d));
        drop((a, b, d, e));
        assert_eq!(guests.open(), 0);
        assert!(guests.table().idle.is_empty());
    }
}
