//! Enums whose codes are part of a format: each variant stands once, with its code and, where messages call it so, its name.

/// Makes the enum with `ALL`, `code` and `from_code`; with a name behind each code also `name` and `Display`.
macro_rules! coded {
    ($(#[$about:meta])* $vis:vis enum $Enum:ident {
        $($(#[$doc:meta])* $Variant:ident = $code:literal => $name:literal,)*
    }) => {
        coded! { $(#[$about])* $vis enum $Enum { $($(#[$doc])* $Variant = $code,)* } }

        impl $Enum {
            /// The name in messages, in the field's usual spelling.
            $vis const fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)*
                }
            }
        }

        impl std::fmt::Display for $Enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
    ($(#[$about:meta])* $vis:vis enum $Enum:ident {
        $($(#[$doc:meta])* $Variant:ident = $code:literal,)*
    }) => {
        $(#[$about])*
        #[repr(u8)]
        $vis enum $Enum { $($(#[$doc])* $Variant = $code,)* }

        impl $Enum {
            /// All of them, in the order of their codes.
            $vis const ALL: [Self; [$($code),*].len()] = [$(Self::$Variant),*];

            /// The stable code.
            $vis const fn code(self) -> u8 {
                self as u8
            }

            /// The one with that code; `None` if the code is not known to this version.
            $vis fn from_code(code: u8) -> Option<Self> {
                Self::ALL.into_iter().find(|one| one.code() == code)
            }
        }
    };
}

pub(crate) use coded;
