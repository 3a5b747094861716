//! What is known of the structs at run time: the header is made of it, and both sides are tested against it.

/// One struct of the ABI, for the header and the tests of both sides.
#[derive(Debug, Clone, Copy)]
pub struct StructLayout {
    /// The Rust name.
    pub name: &'static str,
    /// The comment, line by line.
    pub docs: &'static [&'static str],
    /// `size_of`.
    pub size: usize,
    /// In order.
    pub fields: &'static [FieldLayout],
}

/// One field of a [`StructLayout`].
#[derive(Debug, Clone, Copy)]
pub struct FieldLayout {
    /// The name, the same in C.
    pub name: &'static str,
    /// The Rust type as text.
    pub ty: &'static str,
    /// The comment, line by line.
    pub docs: &'static [&'static str],
    /// `offset_of!`.
    pub offset: usize,
    /// `size_of`.
    pub size: usize,
}
