//! Which parameters travel together.
//!
//! Parameters are grouped into layers (by a function of their names), layers into fragments (by the pattern). Every
//! parameter is in exactly one fragment; a plan that cannot say so is refused.

use ftcore::{Error, Result};

use crate::{Parameters, Pattern};

/// A partition of the parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FragmentPlan {
    fragments: Vec<Vec<usize>>,
}

impl FragmentPlan {
    /// Deals layers to `count` fragments. `layer_of(name)` gives a parameter's layer number; parameters of one layer
    /// stay together. Errors: fewer layers than fragments.
    pub fn by_layer(
        params: &dyn Parameters,
        count: usize,
        pattern: Pattern,
        layer_of: &dyn Fn(&str) -> usize,
    ) -> Result<Self> {
        let mut layers: std::collections::BTreeMap<usize, Vec<usize>> = std::collections::BTreeMap::new();
        for i in 0..params.len() {
            layers.entry(layer_of(params.name(i))).or_default().push(i);
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

    /// An explicit partition. Errors name a parameter that is in two fragments, in none, or an empty fragment.
    pub fn new(fragments: Vec<Vec<usize>>, params: &dyn Parameters) -> Result<Self> {
        let mut seen = vec![None; params.len()];
        for (f, members) in fragments.iter().enumerate() {
            if members.is_empty() {
                return Err(Error::invalid(format!("fragment {f} has no parameters")));
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
        Ok(Self { fragments })
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
    fn a_parameter_in_two_fragments_or_in_none_is_named() {
        let p = params(3);
        let e = FragmentPlan::new(vec![vec![0, 1], vec![1, 2]], &p)
            .unwrap_err()
            .to_string();
        assert!(e.contains("'p1' is in fragments 0 and 1"), "{e}");
        let e = FragmentPlan::new(vec![vec![0, 1]], &p).unwrap_err().to_string();
        assert!(e.contains("'p2' is in no fragment"), "{e}");
        assert!(FragmentPlan::by_layer(&p, 4, Pattern::Strided, &|n| n.len()).is_err());
    }
}
