//! What a plugin is given instead of addresses: numbers that name a lent object, each good for one loan.
//!
//! The ABI passes them as `ctx` and `owner`. A number holds a place in a table and that place's generation, which changes when the loan is over.
//! A plugin that completes twice, releases once too often or uses a number later therefore names nothing: it is told off, and no memory is touched.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("a handle is a place and a generation of 32 bits each, in the size of an address");

/// Names a lent object. Never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handle(u64);

impl Handle {
    /// As it crosses the ABI. Nothing is at this address.
    pub(super) fn to_ctx(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0 as usize)
    }

    pub(super) fn from_ctx(ctx: *const c_void) -> Self {
        Self(ctx.addr() as u64)
    }

    fn new(place: usize, generation: u32) -> Option<Self> {
        let place = u32::try_from(place).ok()?.checked_add(1)?;
        Some(Self(u64::from(generation) << 32 | u64::from(place)))
    }

    fn place(self) -> Option<usize> {
        ((self.0 & 0xffff_ffff) as usize).checked_sub(1)
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

struct Loan<T> {
    object: Arc<T>,
    plugin: &'static str,
    /// The host has not ended it.
    open: bool,
    /// References that the plugin took and has not given back.
    held: usize,
}

struct Place<T> {
    generation: u32,
    loan: Option<Loan<T>>,
    /// Whose the loan of the generation before this one was.
    before: &'static str,
}

struct Table<T> {
    places: Vec<Place<T>>,
    /// The longest unused one first: it takes longest until a generation comes back.
    free: VecDeque<usize>,
}

/// All objects of one kind that plugins have.
pub(super) struct Handles<T> {
    table: Mutex<Table<T>>,
    /// For messages: what a handle of this table is.
    what: &'static str,
}

impl<T> Handles<T> {
    pub(super) const fn new(what: &'static str) -> Self {
        Self {
            table: Mutex::new(Table {
                places: Vec::new(),
                free: VecDeque::new(),
            }),
            what,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table<T>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends `object` to `plugin`. None: there are more loans than numbers.
    pub(super) fn lend(&self, object: Arc<T>, plugin: &'static str) -> Option<Handle> {
        let mut table = self.lock();
        let at = match table.free.pop_front() {
            Some(at) => at,
            None => {
                table.places.push(Place {
                    generation: 0,
                    loan: None,
                    before: "",
                });
                table.places.len() - 1
            }
        };
        let place = table.places.get_mut(at)?;
        let handle = Handle::new(at, place.generation)?;
        place.loan = Some(Loan {
            object,
            plugin,
            open: true,
            held: 0,
        });
        Some(handle)
    }

    /// Ends the loan: the object, and how many references the plugin still holds. None if it was ended before.
    pub(super) fn end(&self, handle: Handle) -> Option<(Arc<T>, usize)> {
        let mut table = self.lock();
        let loan = table.loan(handle).filter(|loan| loan.open)?;
        loan.open = false;
        let ended = (loan.object.clone(), loan.held);
        table.clear_if_over(handle);
        Some(ended)
    }

    /// The object, while it is lent.
    pub(super) fn get(&self, handle: Handle) -> Option<Arc<T>> {
        self.lock().loan(handle).map(|loan| loan.object.clone())
    }

    /// Whatever is lent now.
    pub(super) fn all(&self) -> Vec<Arc<T>> {
        let table = self.lock();
        let loans = table.places.iter().filter_map(|place| place.loan.as_ref());
        loans.map(|loan| loan.object.clone()).collect()
    }

    /// The plugin takes a reference. False: there is nothing to hold.
    pub(super) fn retain(&self, handle: Handle) -> bool {
        let mut table = self.lock();
        let Some(loan) = table.loan(handle) else {
            return false;
        };
        loan.held = loan.held.saturating_add(1);
        true
    }

    /// The plugin gives a reference back: the object, and whether nothing refers to it any more. None: it holds none.
    pub(super) fn release(&self, handle: Handle) -> Option<(Arc<T>, bool)> {
        let mut table = self.lock();
        let loan = table.loan(handle).filter(|loan| loan.held > 0)?;
        loan.held -= 1;
        let released = (loan.object.clone(), !loan.open && loan.held == 0);
        table.clear_if_over(handle);
        Some(released)
    }

    /// Logs that a plugin did `what` with a number that does not allow it.
    pub(super) fn misused(&self, handle: Handle, what: &str) {
        let plugin = self.lock().owner(handle);
        tracing::error!(
            plugin,
            handle = format_args!("{:#x}", handle.0),
            "a plugin broke the ABI: it {what} for {} that it does not have (any more); the call was ignored",
            self.what
        );
    }
}

impl<T> Table<T> {
    fn loan(&mut self, handle: Handle) -> Option<&mut Loan<T>> {
        let place = self.places.get_mut(handle.place()?)?;
        place
            .loan
            .as_mut()
            .filter(|_| place.generation == handle.generation())
    }

    fn clear_if_over(&mut self, handle: Handle) {
        let Some(at) = handle.place() else { return };
        let Some(place) = self.places.get_mut(at) else {
            return;
        };
        if place.loan.as_ref().is_some_and(|loan| loan.open || loan.held > 0) {
            return;
        }
        if let Some(loan) = place.loan.take() {
            place.before = loan.plugin;
            place.generation = place.generation.wrapping_add(1);
            self.free.push_back(at);
        }
    }

    /// Whose the handle is or was, as far as that is still known.
    fn owner(&self, handle: Handle) -> &'static str {
        let place = handle.place().and_then(|at| self.places.get(at));
        match place {
            Some(Place {
                generation,
                loan: Some(loan),
                ..
            }) if *generation == handle.generation() => loan.plugin,
            Some(p) if p.generation == handle.generation().wrapping_add(1) => p.before,
            _ => "?",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_ends_once_and_its_number_names_nothing_afterwards() {
        let handles = Handles::new("a thing");
        let one = handles.lend(Arc::new(1), "p").unwrap();
        assert_eq!(Handle::from_ctx(one.to_ctx()), one);
        assert!(!one.to_ctx().is_null());
        assert_eq!(handles.end(one), Some((Arc::new(1), 0)));
        // The place is used again, by another object of another plugin.
        let two = handles.lend(Arc::new(2), "q").unwrap();
        assert_eq!(two.place(), one.place());
        assert_eq!(handles.end(one), None);
        assert!(handles.get(one).is_none() && !handles.retain(one) && handles.release(one).is_none());
        assert_eq!(handles.lock().owner(one), "p");
        assert_eq!(handles.lock().owner(two), "q");
        assert_eq!(handles.get(two).as_deref(), Some(&2));
    }

    #[test]
    fn what_is_held_outlives_the_loan_and_one_release_too_many_takes_nothing() {
        let handles = Handles::new("a thing");
        let it = handles.lend(Arc::new(7), "p").unwrap();
        assert!(
            handles.release(it).is_none(),
            "the host's own reference is not the plugin's"
        );
        assert!(handles.retain(it) && handles.retain(it));
        assert_eq!(handles.release(it), Some((Arc::new(7), false)));
        assert_eq!(handles.end(it), Some((Arc::new(7), 1)));
        assert_eq!(handles.end(it), None, "it is held, and lent no more");
        assert_eq!(handles.get(it).as_deref(), Some(&7));
        assert_eq!(handles.release(it), Some((Arc::new(7), true)));
        assert!(handles.release(it).is_none() && handles.get(it).is_none());
    }

    #[test]
    fn a_number_that_was_never_given_out_names_nothing() {
        let handles = Handles::<u8>::new("a thing");
        for ctx in [0usize, 1, usize::MAX, 0x7fff_dead_beef] {
            let handle = Handle::from_ctx(std::ptr::without_provenance(ctx));
            assert!(handles.end(handle).is_none() && handles.release(handle).is_none());
            assert_eq!(handles.lock().owner(handle), "?");
        }
    }
}
