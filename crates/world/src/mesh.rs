//! Ranks in named dimensions, with a group along each.

use std::time::Instant;

use ftcore::{Error, ErrorKind, ProcessGroup, Result};

use crate::{GroupSpec, World, grid};

/// The dimensions of a mesh: names and lengths. The last one is the fastest: ranks that differ by one are neighbours in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshShape {
    dimensions: Vec<(String, u32)>,
}

impl MeshShape {
    /// As `[("dp", 2), ("tp", 4)]`: ranks 0 to 3 are the first row, 4 to 7 the second.
    ///
    /// Errors: `InvalidArgument` for no dimension, one without a name or of length 0, two of one name, or more ranks than a `u32` counts.
    pub fn new(dimensions: &[(&str, u32)]) -> Result<Self> {
        if dimensions.is_empty() {
            return Err(Error::invalid("a mesh has at least one dimension"));
        }
        for (n, (name, length)) in dimensions.iter().enumerate() {
            if name.is_empty() || *length == 0 {
                return Err(Error::invalid(format!(
                    "dimension {n} ('{name}', length {length}) needs a name and a length of at least 1"
                )));
            }
            if dimensions.iter().take(n).any(|(other, _)| other == name) {
                return Err(Error::invalid(format!("two dimensions are called '{name}'")));
            }
        }
        grid::size(dimensions.iter().map(|(_, length)| *length))?;
        Ok(Self {
            dimensions: dimensions.iter().map(|(n, l)| ((*n).to_string(), *l)).collect(),
        })
    }

    /// Names and lengths, slowest first.
    pub fn dimensions(&self) -> impl Iterator<Item = (&str, u32)> {
        self.dimensions
            .iter()
            .map(|(name, length)| (name.as_str(), *length))
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.dimensions.iter().map(|(_, length)| length).product()
    }

    fn index(&self, name: &str) -> Result<usize> {
        let found = self.dimensions.iter().position(|(n, _)| n == name);
        found.ok_or_else(|| {
            let known: Vec<&str> = self.dimensions().map(|(n, _)| n).collect();
            Error::new(
                ErrorKind::NotFound,
                format!("the mesh has no dimension '{name}'; it has {}", known.join(", ")),
            )
        })
    }

    /// The position of `rank` in each dimension, slowest first.
    pub fn coordinates(&self, rank: u32) -> Vec<u32> {
        let lengths = self.dimensions.iter().rev().map(|(_, length)| *length);
        let mut fastest_first: Vec<u32> = grid::coordinates(lengths, rank).collect();
        fastest_first.reverse();
        fastest_first
    }

    /// The groups along the dimensions `names` taken together: ranks that differ in nothing else, in ascending order.
    ///
    /// Errors: `NotFound` for a name that the mesh does not have.
    pub fn groups(&self, names: &[&str]) -> Result<Vec<Vec<u32>>> {
        let along = names.iter().map(|n| self.index(n)).collect::<Result<Vec<_>>>()?;
        let lengths = self.dimensions.iter().enumerate().rev();
        let marked: Vec<(u32, bool)> = lengths
            .map(|(n, (_, length))| (*length, along.contains(&n)))
            .collect();
        Ok(grid::groups(&marked))
    }
}

/// The ranks of a world in named dimensions, with this rank's group along each.
///
/// ```no_run
/// use std::time::Duration;
///
/// use ftcore::{ProcessGroupExt as _, ReduceOp, deadline_in};
/// use oxccl_world::{DeviceMesh, MeshShape, World};
///
/// let world = World::from_env()?; // 8 processes
/// let shape = MeshShape::new(&[("replicate", 2), ("shard", 4)])?;
/// let mesh = DeviceMesh::new(&world, shape, deadline_in(Duration::from_secs(30)))?;
/// let mut gradient = [1.0_f32; 16];
/// mesh.group("shard")?.all_reduce_slice(&mut gradient, ReduceOp::Avg)?;
/// mesh.group("replicate")?.all_reduce_slice(&mut gradient, ReduceOp::Avg)?;
/// # Ok::<(), ftcore::Error>(())
/// ```
pub struct DeviceMesh {
    shape: MeshShape,
    rank: u32,
    /// In the order of the dimensions.
    groups: Vec<Box<dyn ProcessGroup>>,
}

impl DeviceMesh {
    /// Makes one group per dimension. A call of all ranks of `world`, with the same shape.
    ///
    /// Errors: `InvalidArgument` if the shape has not as many ranks as the world; those of [`World::split_group`].
    pub fn new(world: &World, shape: MeshShape, deadline: Instant) -> Result<Self> {
        if shape.size() != world.world_size() {
            return Err(Error::invalid(format!(
                "the mesh has {} ranks, the world {}",
                shape.size(),
                world.world_size()
            )));
        }
        let groups = shape
            .dimensions()
            .map(|(name, _)| member(world, &shape, &[name], deadline))
            .collect::<Result<_>>()?;
        Ok(Self {
            rank: world.rank(),
            shape,
            groups,
        })
    }

    /// The dimensions.
    pub fn shape(&self) -> &MeshShape {
        &self.shape
    }

    /// This rank's group along dimension `name`: its rank there is its [`coordinate`](Self::coordinate).
    ///
    /// Errors: `NotFound` for a name that the mesh does not have.
    pub fn group(&self, name: &str) -> Result<&dyn ProcessGroup> {
        let index = self.shape.index(name)?;
        let group = self.groups.get(index).map(|g| &**g);
        group.ok_or_else(|| Error::new(ErrorKind::Internal, "a dimension without a group"))
    }

    /// This rank's position in dimension `name`.
    ///
    /// Errors: `NotFound` for a name that the mesh does not have.
    pub fn coordinate(&self, name: &str) -> Result<u32> {
        let index = self.shape.index(name)?;
        let at = self.shape.coordinates(self.rank).get(index).copied();
        at.ok_or_else(|| Error::new(ErrorKind::Internal, "a dimension without a coordinate"))
    }

    /// A new group along several dimensions taken together, as data and context parallel for gradients. A call of all ranks of `world`, the
    /// one that the mesh was made from.
    ///
    /// Errors: `NotFound` for a name that the mesh does not have; those of [`World::split_group`].
    pub fn joint_group(
        &self,
        world: &World,
        names: &[&str],
        deadline: Instant,
    ) -> Result<Box<dyn ProcessGroup>> {
        member(world, &self.shape, names, deadline)
    }
}

/// This rank's group along `names`.
fn member(
    world: &World,
    shape: &MeshShape,
    names: &[&str],
    deadline: Instant,
) -> Result<Box<dyn ProcessGroup>> {
    let group = world.split_group(&shape.groups(names)?, &GroupSpec::default(), deadline)?;
    group.ok_or_else(|| Error::new(ErrorKind::Internal, "this rank is in no group of the mesh"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_dimension_is_the_fastest() {
        let shape = MeshShape::new(&[("dp", 2), ("tp", 3)]).unwrap();
        assert_eq!(shape.coordinates(4), [1, 1]);
        assert_eq!(shape.groups(&["tp"]).unwrap(), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(shape.groups(&["dp"]).unwrap(), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(shape.groups(&["tp", "dp"]).unwrap(), [[0, 1, 2, 3, 4, 5]]);
        let e = shape.groups(&["pp"]).unwrap_err();
        assert!(e.to_string().contains("it has dp, tp"), "{e}");
    }

    #[test]
    fn a_wrong_shape_says_what_is_wrong() {
        for (dimensions, says) in [
            (&[][..], "at least one"),
            (&[("a", 0)], "length of at least 1"),
            (&[("", 2)], "needs a name"),
            (&[("a", 2), ("a", 2)], "two dimensions are called 'a'"),
            (&[("a", u32::MAX), ("b", 2)], "more ranks"),
        ] {
            let e = MeshShape::new(dimensions).unwrap_err();
            assert!(e.to_string().contains(says), "{dimensions:?}: {e}");
        }
    }
}
