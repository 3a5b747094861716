//! Several states under keys that heal as one: all of them, or none.

use std::collections::BTreeMap;

use crate::state_dict::StateDict;
use ftcore::{Error, ErrorKind, Result};

use crate::replica::State;

/// Under this key the keys of the parts stand in what is saved, so that a part without content is there too.
const KEYS: &str = "states";

/// The parts of a replica's state, each under a key of its own: `States::new().with("model", &mut model)?.with("data", &mut data)?` is the
/// [`State`] that [`start_quorum`](crate::Replica::start_quorum) is given.
///
/// All replicas of a job have the same keys. One that lacks a key of the others, or has one more, is told so (`InvalidArgument`) when it
/// heals, and nothing of it has changed; the others go on. A part that refuses what came for it leaves all parts as they were:
/// for that, healing makes a copy of them first.
///
/// It borrows its parts. Where `Ddp::train` or `Diloco::train` owns the state and its closures change the parts, a tuple of two or three
/// states is the same thing: `(params, momentum)`.
#[derive(Default)]
pub struct States<'a>(BTreeMap<String, &'a mut dyn State>);

impl<'a> States<'a> {
    /// No parts yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a part. Errors: `InvalidArgument` for a key that is empty or has a '/' or a line break in it, `Conflict` for one that is
    /// taken.
    pub fn with(mut self, key: &str, state: &'a mut dyn State) -> Result<Self> {
        if key.is_empty() || key.contains(['/', '\n']) {
            return Err(Error::invalid(format!(
                "'{key}' cannot be the key of a state: it has characters, and no '/' or line break among them"
            )));
        }
        if self.0.contains_key(key) {
            return Err(Error::new(
                ErrorKind::Conflict,
                format!("there is a state under '{key}' already"),
            ));
        }
        self.0.insert(key.to_owned(), state);
        Ok(self)
    }
}

impl State for States<'_> {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        let parts: Vec<(&str, &dyn State)> =
            self.0.iter().map(|(key, part)| (&**key, &**part as _)).collect();
        save(&parts, out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        let parts = self.0.iter_mut();
        load(
            &mut parts
                .map(|(key, part)| (&**key, &mut **part as _))
                .collect::<Vec<_>>(),
            from,
        )
    }
}

/// As [`States`] under the keys "0" and "1": a model and what its optimizer keeps, say, where the training loop changes both.
impl<A: State, B: State> State for (A, B) {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        save(&[("0", &self.0), ("1", &self.1)], out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        load(&mut [("0", &mut self.0), ("1", &mut self.1)], from)
    }
}

/// As [`States`] under the keys "0", "1" and "2".
impl<A: State, B: State, C: State> State for (A, B, C) {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        save(&[("0", &self.0), ("1", &self.1), ("2", &self.2)], out)
    }

    fn load(&mut self, from: &StateDict) -> Result<()> {
        load(
            &mut [("0", &mut self.0), ("1", &mut self.1), ("2", &mut self.2)],
            from,
        )
    }
}

/// Parts in the order of their keys, each into its own place.
fn save(parts: &[(&str, &dyn State)], out: &mut StateDict) -> Result<()> {
    for (key, part) in parts {
        out.merge(key, saved(key, *part)?)?;
    }
    let keys: Vec<&str> = parts.iter().map(|(key, _)| *key).collect();
    out.set_metadata(KEYS, keys.join("\n"));
    Ok(())
}

/// All parts, in the order of their keys, or none.
fn load(parts: &mut [(&str, &mut dyn State)], from: &StateDict) -> Result<()> {
    let ours: Vec<&str> = parts.iter().map(|(key, _)| *key).collect();
    let theirs = from.metadata().get(KEYS).ok_or_else(|| {
        Error::invalid(format!(
            "the state that came has no parts; this replica has {}",
            ours.join(", ")
        ))
    })?;
    let theirs: Vec<&str> = theirs.split('\n').filter(|k| !k.is_empty()).collect();
    let only = |a: &[&str], b: &[&str]| {
        let keys: Vec<&str> = a.iter().copied().filter(|k| !b.contains(k)).collect();
        if keys.is_empty() {
            "none".to_owned()
        } else {
            keys.join(", ")
        }
    };
    if theirs != ours {
        return Err(Error::invalid(format!(
            "the parts of the state differ: only there: {}; only here: {}. All replicas have the same keys",
            only(&theirs, &ours),
            only(&ours, &theirs)
        )));
    }
    let mut from = from.clone();
    let mut before = Vec::with_capacity(parts.len());
    for (key, part) in parts.iter() {
        before.push(saved(key, &**part)?);
    }
    for done in 0..parts.len() {
        let Some((key, part)) = parts.get_mut(done) else {
            break;
        };
        let loaded = from.split(key).and_then(|own| part.load(&own));
        let Err(error) = loaded else { continue };
        let error = of_part(key, error);
        // The part that refused may have taken something over as well.
        for ((key, part), old) in parts.iter_mut().zip(&before).take(done + 1) {
            part.load(old).map_err(|e| {
                let text = format!(
                    "{error}; and '{key}' cannot be put back as it was ({e}): this replica holds the state of no step, start it again"
                );
                Error::invalid(text).with_source(e)
            })?;
        }
        return Err(error);
    }
    Ok(())
}

fn saved(key: &str, part: &dyn State) -> Result<StateDict> {
    let mut own = StateDict::new();
    part.save(&mut own).map_err(|e| of_part(key, e))?;
    Ok(own)
}

/// Saves what a training loop adds to the state of those that train for it, which is in `out` already. Errors: those of `inner`; `InvalidArgument` that
/// names what both would save: one would heal to the other's values.
pub fn save_beside(inner: &dyn State, out: &mut StateDict) -> Result<()> {
    let mut own = StateDict::new();
    inner.save(&mut own)?;
    out.add(own).map_err(|e| {
        let text = format!(
            "the training loop's own state: {}; let it save this under another name",
            e.message()
        );
        Error::invalid(text).with_source(e)
    })
}

fn of_part(key: &str, error: Error) -> Error {
    Error::new(error.kind(), format!("state '{key}': {error}")).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Part {
        values: Vec<f32>,
        /// Takes over what comes and then refuses it.
        refuses: bool,
    }

    fn part(values: &[f32]) -> Part {
        Part {
            values: values.to_vec(),
            refuses: false,
        }
    }

    impl State for Part {
        fn save(&self, out: &mut StateDict) -> Result<()> {
            if self.values.is_empty() {
                return Ok(());
            }
            out.insert_f32("v", &[self.values.len()], &self.values)
        }
        fn load(&mut self, from: &StateDict) -> Result<()> {
            self.values = if from.is_empty() {
                Vec::new()
            } else {
                from.get_f32("v")?
            };
            if std::mem::take(&mut self.refuses) {
                return Err(Error::invalid("not for me"));
            }
            Ok(())
        }
    }

    fn given(parts: &mut [(&str, Part)]) -> StateDict {
        let mut out = StateDict::new();
        let all = parts
            .iter_mut()
            .fold(States::new(), |all, (key, part)| all.with(key, part).unwrap());
        all.save(&mut out).unwrap();
        out
    }

    #[test]
    fn every_part_gets_what_was_saved_under_its_key_also_if_that_was_nothing() {
        let from = given(&mut [("a", part(&[1.0])), ("b", part(&[2.0, 3.0])), ("c", part(&[]))]);
        let (mut a, mut b, mut c) = (part(&[9.0]), part(&[]), part(&[9.0]));
        // In whatever order they are added.
        let all = States::new()
            .with("c", &mut c)
            .unwrap()
            .with("a", &mut a)
            .unwrap();
        all.with("b", &mut b).unwrap().load(&from).unwrap();
        assert_eq!(
            [&a.values[..], &b.values, &c.values],
            [&[1.0][..], &[2.0, 3.0], &[]]
        );
    }

    #[test]
    fn parts_that_differ_are_told_by_their_keys_and_nothing_has_changed() {
        for (theirs, told) in [
            (&["a", "x"][..], ["only there: x", "only here: b"]),
            (&["a"], ["only there: none", "only here: b"]),
            (&["a", "b", "c"], ["only there: c", "only here: none"]),
        ] {
            let mut parts: Vec<(&str, Part)> = theirs.iter().map(|key| (*key, part(&[1.0]))).collect();
            let from = given(&mut parts);
            let (mut a, mut b) = (part(&[8.0]), part(&[9.0]));
            let mut all = States::new()
                .with("a", &mut a)
                .unwrap()
                .with("b", &mut b)
                .unwrap();
            let e = all.load(&from).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(told.iter().all(|t| e.message().contains(t)), "{e}");
            assert_eq!((a.values, b.values), (vec![8.0], vec![9.0]));
        }
        let mut a = part(&[8.0]);
        let mut plain = StateDict::new();
        plain.insert_f32("v", &[1], &[1.0]).unwrap();
        let e = States::new().with("a", &mut a).unwrap().load(&plain).unwrap_err();
        assert!(e.message().contains("has no parts"), "{e}");
    }

    #[test]
    fn a_part_that_refuses_what_came_leaves_all_parts_as_they_were() {
        let from = given(&mut [("a", part(&[1.0])), ("b", part(&[2.0])), ("c", part(&[3.0]))]);
        let (mut a, mut b, mut c) = (part(&[7.0]), part(&[8.0]), part(&[9.0]));
        b.refuses = true;
        let all = States::new()
            .with("a", &mut a)
            .unwrap()
            .with("b", &mut b)
            .unwrap();
        let e = all.with("c", &mut c).unwrap().load(&from).unwrap_err();
        assert!(
            e.message().contains("'b'") && e.message().contains("not for me"),
            "{e}"
        );
        assert_eq!([a.values, b.values, c.values], [[7.0], [8.0], [9.0]]);
    }

    #[test]
    fn a_tuple_heals_as_a_whole_and_stays_as_it_was_if_a_part_refuses() {
        let mut out = StateDict::new();
        (part(&[1.0]), part(&[2.0, 3.0]), part(&[]))
            .save(&mut out)
            .unwrap();
        let mut all = (part(&[7.0]), part(&[8.0]), part(&[9.0]));
        all.2.refuses = true;
        let e = all.load(&out).unwrap_err();
        assert!(e.message().contains("'2'"), "{e}");
        assert_eq!(
            [&all.0.values, &all.1.values, &all.2.values],
            [&[7.0], &[8.0], &[9.0]]
        );
        all.load(&out).unwrap();
        assert_eq!(
            [&all.0.values[..], &all.1.values, &all.2.values],
            [&[1.0][..], &[2.0, 3.0], &[]]
        );
        let e = (part(&[]), part(&[])).load(&out).unwrap_err();
        assert!(e.message().contains("only there: 2"), "{e}");
    }

    #[test]
    fn a_key_that_is_taken_or_cannot_be_one_is_refused() {
        let (mut a, mut b) = (part(&[]), part(&[]));
        for key in ["", "a/b", "a\nb"] {
            let e = States::new().with(key, &mut a).err().unwrap();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        }
        let e = States::new()
            .with("a", &mut a)
            .unwrap()
            .with("a", &mut b)
            .err()
            .unwrap();
        assert_eq!(e.kind(), ErrorKind::Conflict);
    }
}
