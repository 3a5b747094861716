//! Which parameters travel together.
//!
//! Parameters are grouped into layers (by a function of their names), layers into fragments (by the pattern). Every
//! parameter is in exactly one fragment; a plan that cannot say so is refused.

use std::collections::BTreeMap;

use ftcore::{Error, Result};

use crate::{Parameters, Pattern};

/// A partition of the parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FragmentPlan {
    fragments: Vec<Vec<usize>>,
}

impl FragmentPlan {
    /// Deals layers to `count` fragments. The first part of a name that is a number is the layer (`blocks.3.attn.weight`, `h.3.bias`: names as PyTorch,
    /// candle and Hugging Face give them); parameters without one before the first that has one (the embeddings) are a layer of their own, and so are
    /// those after it (the last norm and the head). Errors: as of [`by_layer`](Self::by_layer).
    pub fn by_name(params: &dyn Parameters, count: usize, pattern: Pattern) -> Result<Self> {
        let number = |i: usize| {
            params
                .name(i)
                .split('.')
                .find_map(|part| part.parse::<usize>().ok())
        };
        let first = (0..params.len()).find(|&i| number(i).is_some());
        let layer = |i: usize| match number(i) {
            Some(n) => n.saturating_add(1),
            None if first.is_none_or(|first| i < first) => 0,
            None => usize::MAX,
        };
        Self::deal(params, count, pattern, &layer)
    }

    /// Deals layers to `count` fragments. `layer_of(name)` gives a parameter's layer number; parameters of one layer
    /// stay together. Errors: no parameters, or fewer layers than fragments.
    pub fn by_layer(
        params: &dyn Parameters,
        count: usize,
        pattern: Pattern,
        layer_of: &dyn Fn(&str) -> usize,
    ) -> Result<Self> {
        Self::deal(params, count, pattern, &|i| layer_of(params.name(i)))
    }

    fn deal(
        params: &dyn Parameters,
        count: usize,
        pattern: Pattern,
        layer: &dyn Fn(usize) -> usize,
    ) -> Result<Self> {
        let mut layers: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for i in 0..params.len() {
            layers.entry(layer(i)).or_default().push(i);
        }
        if layers.is_empty() {
            return Err(Error::invalid(
                "the model has no parameters, so there is nothing to synchronise",
            ));
        }
        if count == 0 || layers.len() < count {
            return Err(Error::invalid(format!(
                "{} layers cannot fill {count} fragments; use at most {} fragments",
                layers.len(),
                layers.len()
            )));
        }
        let total = layers.len();
        let mut fragments = vec![Vec::new(); count];
        for (position, members) in layers.into_values().enumerate() {
            let f = match pattern {
                Pattern::Strided => position % count,
                Pattern::Sequential => position * count / total,
            };
            if let Some(fragment) = fragments.get_mut(f) {
                fragment.extend(members);
            }
        }
        Self::new(fragments, params)
    }

    /// An explicit partition. Errors name a parameter that is in two fragments or in none, two of one name, and a fragment without
    /// values.
    pub fn new(fragments: Vec<Vec<usize>>, params: &dyn Parameters) -> Result<Self> {
        let plan = Self { fragments };
        plan.check(params)?;
        Ok(plan)
    }

    /// That this is a partition of `params`. Errors: see [`new`](Self::new).
    pub(crate) fn check(&self, params: &dyn Parameters) -> Result<()> {
        let fragments = &self.fragments;
        let mut names = BTreeMap::new();
        for i in 0..params.len() {
            if let Some(other) = names.insert(params.name(i), i) {
                return Err(Error::invalid(format!(
                    "parameters {other} and {i} are both called '{}': one would overwrite the other in a replica that heals; give each a \
                     name of its own",
                    params.name(i)
                )));
            }
        }
        let mut seen = vec![None; params.len()];
        for (f, members) in fragments.iter().enumerate() {
            if members.iter().all(|&i| i < params.len() && params.count(i) == 0) {
                return Err(Error::invalid(format!(
                    "fragment {f} has no values: its rounds would send nothing; use fewer fragments, or deal the layers otherwise"
                )));
            }
            for &i in members {
                match seen.get_mut(i) {
                    None => {
                        return Err(Error::invalid(format!(
                            "fragment {f} names parameter {i}, which does not exist"
                        )));
                    }
                    Some(Some(other)) => {
                        return Err(Error::invalid(format!(
                            "parameter '{}' is in fragments {other} and {f}",
                            params.name(i)
                        )));
                    }
                    Some(slot) => *slot = Some(f),
                }
            }
        }
        if let Some(i) = seen.iter().position(Option::is_none) {
            return Err(Error::invalid(format!(
                "parameter '{}' is in no fragment, so it would never be synchronised",
                params.name(i)
            )));
        }
        Ok(())
    }

    /// The number of fragments.
    pub fn len(&self) -> usize {
        self.fragments.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.fragments.is_empty()
    }

    /// The parameters of fragment `f`.
    pub fn members(&self, f: usize) -> &[usize] {
        self.fragments.get(f).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SliceParameters;

    fn params(n: usize) -> SliceParameters {
        SliceParameters::new((0..n).map(|i| (format!("p{i}"), vec![0.0; i + 1])).collect())
    }

    #[test]
    fn strided_and_sequential_deal_layers_as_named() {
        let p = params(6);
        let layer = |n: &str| n[1..].parse::<usize>().unwrap();
        let strided = FragmentPlan::by_layer(&p, 2, Pattern::Strided, &layer).unwrap();
        assert_eq!(
            (strided.members(0), strided.members(1)),
            (&[0, 2, 4][..], &[1, 3, 5][..])
        );
        let sequential = FragmentPlan::by_layer(&p, 3, Pattern::Sequential, &layer).unwrap();
        assert_eq!(sequential.members(1), [2, 3]);
    }

    #[test]
    fn layers_are_told_by_names_in_the_order_of_the_forward_pass() {
        let names = [
            "tok.weight",
            "pos.weight",
            "h.0.attn.weight",
            "h.0.mlp.2.weight",
            "h.10.mlp.weight",
            "h.2.mlp.weight",
            "norm.weight",
            "head.weight",
        ];
        let p = SliceParameters::new(names.map(|name| (name.to_string(), vec![0.0])).into());
        // Layers: both embeddings; 0; 2; 10; norm and head.
        let plan = FragmentPlan::by_name(&p, 5, Pattern::Sequential).unwrap();
        let members: Vec<&[usize]> = (0..5).map(|f| plan.members(f)).collect();
        assert_eq!(members, [&[0, 1][..], &[2, 3], &[5], &[4], &[6, 7]]);
        assert!(FragmentPlan::by_name(&p, 6, Pattern::Strided).is_err());
        // Without a number anywhere all is one layer.
        let p = SliceParameters::new(vec![("w".into(), vec![0.0]), ("b".into(), vec![0.0])]);
        assert_eq!(
            FragmentPlan::by_name(&p, 1, Pattern::Strided).unwrap().members(0),
            [0, 1]
        );
    }

    #[test]
    fn a_parameter_in_two_fragments_or_in_none_is_named() {
        let p = params(3);
        let e = FragmentPlan::new(vec![vec![0, 1], vec![1, 2]], &p)
            .unwrap_err()
            .to_string();
        assert!(e.contains("'p1' is in fragments 0 and 1"), "{e}");
        let e = FragmentPlan::new(vec![vec![0, 1]], &p).unwrap_err().to_string();
        assert!(e.contains("'p2' is in no fragment"), "{e}");
        let e = FragmentPlan::new(vec![vec![0, 1, 2, 3]], &p)
            .unwrap_err()
            .to_string();
        assert!(e.contains("names parameter 3, which does not exist"), "{e}");
    }

    #[test]
    fn what_could_not_be_synchronised_is_refused_with_what_to_change() {
        let refused = |plan: Result<FragmentPlan>, says: &str| {
            let e = plan.unwrap_err();
            assert_eq!(e.kind(), ftcore::ErrorKind::InvalidArgument);
            assert!(e.to_string().contains(says), "{e}");
        };
        let one_layer = |p: &SliceParameters, n| FragmentPlan::by_layer(p, n, Pattern::Strided, &|_| 0);
        refused(one_layer(&params(3), 4), "use at most 1 fragments");
        refused(one_layer(&params(0), 1), "no parameters");
        let named = |all: &[(&str, usize)]| {
            SliceParameters::new(all.iter().map(|(n, c)| (n.to_string(), vec![0.0; *c])).collect())
        };
        let twice = named(&[("w", 1), ("v", 2), ("w", 3)]);
        refused(one_layer(&twice, 1), "parameters 0 and 2 are both called 'w'");
        let hollow = named(&[("a", 0), ("b", 1), ("c", 0)]);
        refused(
            FragmentPlan::new(vec![vec![1], vec![0, 2]], &hollow),
            "fragment 1 has no values",
        );
        refused(
            FragmentPlan::new(vec![vec![0, 1, 2], vec![]], &hollow),
            "fragment 1",
        );
        // Beside others an empty parameter does no harm.
        one_layer(&hollow, 1).unwrap();
    }
}
