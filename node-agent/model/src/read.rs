//! From a header to a model: the one place where metadata and tensors are read.

use std::ops::Range;

use prima_gguf::Gguf;

use crate::error::ModelError;
use crate::experts::ExpertOptions;
use crate::families::{
    self, EmbeddingScale, Family, Presence, Softcap, WindowPattern, WindowedRope,
};
use crate::keys::{Keys, MAX_SIZE, Pattern};
use crate::layer::{AllLayers, Layer};
use crate::rope::{Divisors, Rope, RopePairing, Yarn};
use crate::shape::Shape;
use crate::spec::{LayerSpec, ModelSpec, Pooling, Temperature};
use crate::tensor_rows::TensorRows;
use crate::tensors::Tensors;

const EMBEDDING: &str = "token_embd.weight";
const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";
const WINDOWED_DIMENSIONS: &str = "rope.dimension_count_swa";
const SECTIONS: &str = "rope.dimension_sections";
const CAUSAL: &str = "attention.causal";
const MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";
const FACTOR: &str = "rope.scaling.attn_factor";
const SCALING: &str = "rope.scaling.type";
const SHORT_FACTORS: &str = "rope_factors_short.weight";
const LONG_FACTORS: &str = "rope_factors_long.weight";
const ORIGINAL_CONTEXT: &str = "rope.scaling.original_context_length";

impl ModelSpec {
    /// The model with this header. `file`, a path or an address, names it in errors.
    ///
    /// # Errors
    /// [`ModelError`]: a family or an option that prima does not compute; metadata or tensors that are missing, contradict each other, or
    /// are more than the family has.
    pub fn read(file: &str, gguf: &Gguf) -> Result<ModelSpec, ModelError> {
        let name = gguf.metadata.require_str("general.architecture")?;
        let family = families::by_name(name).ok_or_else(|| ModelError::UnknownArchitecture {
            file: file.to_owned(),
            found: name.to_owned(),
            known: families::names().collect::<Vec<_>>().join(", "),
        })?;
        let keys = Keys {
            file,
            metadata: &gguf.metadata,
            prefix: family.architecture,
        };
        let (layers, predicting) = layers(&keys)?;
        let mut tensors = Tensors::new(file, gguf, family.architecture, predicting);
        let reader = Reader {
            family,
            keys: &keys,
            shape: Shape::read(&keys, family)?,
        };
        let model = reader.model(layers, &mut tensors)?;
        tensors.finish()?;
        Ok(model)
    }
}

/// How many layers compute a token, and which layers behind them predict further ones.
fn layers(keys: &Keys<'_>) -> Result<(usize, Range<usize>), ModelError> {
    const PREDICTING: &str = "nextn_predict_layers";
    let all = keys.size("block_count")?;
    match keys.optional_u32(PREDICTING)?.unwrap_or(0) as usize {
        predicting if predicting < all => Ok((all - predicting, all - predicting..all)),
        predicting => Err(keys.refuse(PREDICTING, format!("fewer than {all} layers"), predicting)),
    }
}

/// What makes scores of a state, if the file has it.
fn classifier(tensors: &mut Tensors<'_>, hidden: usize) -> Result<Option<TensorRows>, ModelError> {
    const CLASSIFIER: &str = "cls.output.weight";
    const MOST_SCORES: usize = 1024;
    if !tensors.has(CLASSIFIER) {
        return Ok(None);
    }
    let scores = tensors.rows(CLASSIFIER, hidden, MOST_SCORES)?;
    tensors.matrix(CLASSIFIER, hidden, scores).map(Some)
}

/// What a model is read by.
struct Reader<'a> {
    family: &'static Family,
    keys: &'a Keys<'a>,
    shape: Shape,
}

impl Reader<'_> {
    fn model(&self, layers: usize, tensors: &mut Tensors<'_>) -> Result<ModelSpec, ModelError> {
        let Reader {
            family,
            keys,
            ref shape,
        } = *self;
        if keys.flag(CAUSAL)? == Some(false) {
            let expected = "true: prima computes models where a token sees those before it only";
            return Err(keys.refuse(CAUSAL, expected, false));
        }
        let hidden = shape.hidden;
        let vocabulary = tensors.rows(EMBEDDING, hidden, MAX_SIZE as usize)?;
        let embedding = tensors.matrix(EMBEDDING, hidden, vocabulary)?;
        let output_norm = tensors.vector("output_norm.weight", hidden)?;
        let output = tensors.optional_matrix("output.weight", hidden, vocabulary)?;
        let rope = self.rope(tensors)?;
        let same = AllLayers {
            family,
            shape,
            experts: ExpertOptions::read(keys, family, shape.feed_forward, vocabulary)?,
            scale: self.scale(layers, &rope)?,
            softcap: self.softcap(family.softcaps.attention, "attn_logit_softcapping")?,
            temperature: self.temperature()?,
            windowed_rope: self.windowed_rope(&rope)?,
            rope,
        };
        let scale = |key| match family.scale_keys {
            true => keys.positive_or_none(key),
            false => Ok(None),
        };
        let logit_divisor = scale("logit_scale")?;
        let pooling = self.pooling()?;
        let classifier = match (pooling, family.classifier) {
            (Pooling::Rank, Presence::IfThere) => classifier(tensors, hidden)?,
            _ => None,
        };
        let windows = self.windows(layers)?;
        let layers = windows.into_iter().enumerate().map(|(index, window)| {
            let mut layer = Layer {
                same: &same,
                index,
                tensors: &mut *tensors,
            };
            Ok(LayerSpec {
                attention: layer.attention(window)?,
                feed_forward: layer.feed_forward()?,
            })
        });
        Ok(ModelSpec {
            architecture: family.architecture,
            hidden,
            vocabulary,
            context_length: self.context_length()?,
            norm_epsilon: keys.positive("attention.layer_norm_rms_epsilon")?,
            layers: layers.collect::<Result<_, ModelError>>()?,
            output_norm,
            output_head: output.unwrap_or_else(|| embedding.clone()),
            embedding,
            embedding_scale: match family.embedding_scale {
                EmbeddingScale::One => 1.0,
                EmbeddingScale::RootOfWidth => (hidden as f32).sqrt(),
                EmbeddingScale::Key => keys.positive_or_none("embedding_scale")?.unwrap_or(1.0),
            },
            residual_scale: scale("residual_scale")?.unwrap_or(1.0),
            logit_scale: logit_divisor.map_or(1.0, |divisor| 1.0 / divisor),
            logit_softcap: self.softcap(family.softcaps.logits, "final_logit_softcapping")?,
            pooling,
            classifier,
        })
    }

    /// The numbers are llama.cpp's; 0 is none.
    fn pooling(&self) -> Result<Pooling, ModelError> {
        const POOLING: &str = "pooling_type";
        match self.keys.optional_u32(POOLING)? {
            None | Some(0) => Ok(Pooling::default()),
            Some(1) => Ok(Pooling::Mean),
            Some(2) => Ok(Pooling::Cls),
            Some(3) => Ok(Pooling::Last),
            Some(4) => Ok(Pooling::Rank),
            Some(other) => Err(self.keys.refuse(POOLING, "a number from 0 to 4", other)),
        }
    }

    fn context_length(&self) -> Result<usize, ModelError> {
        let trained = self.keys.size("context_length")?;
        let window = self.keys.optional_u32(WINDOW)?;
        Ok(match (self.family.windows, window) {
            (WindowPattern::None, Some(window)) if window > 0 => trained.min(window as usize),
            _ => trained,
        })
    }

    /// The window of each layer.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
        let WindowPattern::Some {
            period, default, ..
        } = self.family.windows
        else {
            return Ok(vec![None; layers]);
        };
        // 0 means none.
        let window = match self.keys.optional_u32(WINDOW)? {
            Some(window) => Some(window as usize).filter(|&window| window > 0),
            None => default,
        };
        let windowed = match self.keys.pattern(PATTERN)? {
            None => all_but_every(period, layers),
            Some(Pattern::Period(period)) => all_but_every(period, layers),
            Some(Pattern::Layers(windowed)) if windowed.len() >= layers => windowed,
            Some(Pattern::Layers(windowed)) => {
                let expected = format!("one for each of {layers} layers");
                return Err(self.keys.refuse(PATTERN, expected, windowed.len()));
            }
        };
        let windows = windowed.into_iter().take(layers);
        Ok(windows
            .map(|windowed| window.filter(|_| windowed))
            .collect())
    }

    /// What scores are multiplied by.
    fn scale(&self, layers: usize, rope: &Option<Rope>) -> Result<f32, ModelError> {
        let Shape {
            hidden,
            heads,
            head_dim,
            latent,
            ..
        } = self.shape;
        if let Some(latent) = latent {
            let stretched = self.latent_magnitude(rope)?;
            let width = (latent.unrotated + latent.rotated) as f32;
            let scale = stretched * stretched / width.sqrt();
            if !scale.is_normal() {
                let expected = "one by which scores stay numbers";
                return Err(self.keys.refuse(MULTIPLIER, expected, stretched));
            }
            return Ok(scale);
        }
        if self.family.scale_keys
            && let Some(scale) = self.keys.positive_or_none("attention.scale")?
        {
            return Ok(scale);
        }
        let width = match self.family.scaled_by_width == Some(layers) {
            true => hidden as f32 / heads as f32,
            false => head_dim as f32,
        };
        Ok(1.0 / width.sqrt())
    }

    /// What YaRN multiplies queries and keys by where they are latents: only a part of these is rotated, so it is in the scale of scores.
    /// (llama.cpp has that of sines and cosines in it, too.)
    fn latent_magnitude(&self, rope: &Option<Rope>) -> Result<f32, ModelError> {
        match rope {
            Some(rope) if rope.yarn.is_some() => {
                let multiplier = self.yarn_log_multiplier()?.unwrap_or(0.0);
                Ok(rope.magnitude * Yarn::magnitude(rope.factor, multiplier))
            }
            _ => Ok(1.0),
        }
    }

    fn softcap(&self, softcap: Softcap, key: &str) -> Result<Option<f32>, ModelError> {
        match softcap {
            Softcap::Never => Ok(None),
            Softcap::Key(default) if !self.keys.has(key) => Ok(default),
            Softcap::Key(_) => self.keys.positive_or_none(key),
        }
    }

    fn temperature(&self) -> Result<Option<Temperature>, ModelError> {
        if !self.family.long_context_keys {
            return Ok(None);
        }
        let scale = self.keys.positive_or_none("attention.temperature_scale")?;
        match scale {
            Some(scale) => Ok(Some(Temperature {
                scale,
                positions: match self.family.latent {
                    true => self.keys.size("attention.temperature_length")?,
                    false => self.original_context()?,
                },
            })),
            None => Ok(None),
        }
    }

    fn original_context(&self) -> Result<usize, ModelError> {
        match self.keys.optional_size(ORIGINAL_CONTEXT)? {
            Some(original) => Ok(original),
            None => self.keys.size("context_length"),
        }
    }

    /// The rotation in layers without a window; `None`: no layer is rotated.
    fn rope(&self, tensors: &mut Tensors<'_>) -> Result<Option<Rope>, ModelError> {
        let Reader {
            family,
            keys,
            shape: Shape { head_dim, .. },
        } = *self;
        // In granite, the key says whether there is a rotation at all.
        if family.scale_keys && keys.flag("rope.scaling.finetuned")? == Some(false) {
            return Ok(None);
        }
        let dimensions = keys.optional_size("rope.dimension_count")?;
        let dimensions = dimensions.unwrap_or(head_dim);
        if dimensions > head_dim || dimensions % 2 != 0 {
            let expected = format!("an even number up to {head_dim}, the length of a head");
            return Err(keys.refuse("rope.dimension_count", expected, dimensions));
        }
        let mut rope = Rope {
            pairing: self.rope_pairing()?,
            dimensions,
            base: keys.positive_or("rope.freq_base", 10_000.0)?,
            factor: 1.0,
            yarn: None,
            // Llama 3.1 and later store their scaling this way.
            divisors: tensors
                .optional_vector("rope_freqs.weight", dimensions / 2)?
                .map(Divisors::Always),
            magnitude: keys.positive_or(FACTOR, 1.0)?,
        };
        let scaling = match keys.text(SCALING)? {
            // llama.cpp's converter names no kind for Phi-3 and Phi-4-mini: their tensors tell.
            None if tensors.has(LONG_FACTORS) => Some("longrope"),
            named => named,
        };
        match scaling {
            Some("none") => {}
            None | Some("linear") => {
                let older = keys.positive_or("rope.scale_linear", 1.0)?;
                rope.factor = keys.positive_or("rope.scaling.factor", older)?;
            }
            Some("yarn") => {
                rope.factor = keys.positive("rope.scaling.factor")?;
                rope.yarn = Some(self.yarn()?);
                rope.magnitude *= self.yarn_magnitude(rope.factor)?;
            }
            Some("longrope") => {
                let pairs = dimensions / 2;
                rope.divisors = Some(Divisors::ByContext {
                    short: tensors.vector(SHORT_FACTORS, pairs)?,
                    long: tensors.vector(LONG_FACTORS, pairs)?,
                    original_context: self.original_context()?,
                });
            }
            Some(other) => {
                let expected = "none, linear, yarn or longrope, the kinds that prima computes";
                return Err(keys.refuse(SCALING, expected, format!("{other:?}")));
            }
        }
        Ok(Some(rope))
    }

    /// In a text, all parts of a position are the same number, but for the fourth, which is 0.
    fn rope_pairing(&self) -> Result<RopePairing, ModelError> {
        let sections = self.keys.numbers(SECTIONS)?;
        if let Some(fourth) = sections.get(3).filter(|&&pairs| pairs != 0) {
            return Err(self.keys.refuse(SECTIONS, "0 pairs in the fourth", fourth));
        }
        let parts = matches!(sections[..], [first, second, ..] if first > 0 && second > 0);
        Ok(match parts && self.family.sections_pair_halves {
            true => RopePairing::Halves,
            false => self.family.rope_pairing,
        })
    }

    fn yarn(&self) -> Result<Yarn, ModelError> {
        let beta = |key, default| match self.family.long_context_keys {
            true => self.keys.positive_or(key, default),
            false => Ok(default),
        };
        Ok(Yarn {
            original_context: self.original_context()?,
            beta_fast: beta("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: beta("rope.scaling.yarn_beta_slow", 1.0)?,
        })
    }

    fn yarn_magnitude(&self, factor: f32) -> Result<f32, ModelError> {
        Ok(match self.yarn_log_multiplier()? {
            None => Yarn::magnitude(factor, 1.0),
            // Of what latents are multiplied by, sines and cosines have nothing.
            Some(_) if self.family.latent => 1.0,
            // Where the file tells how scores are scaled over all dimensions, sines and cosines have only the rest of it.
            Some(multiplier) => Yarn::magnitude(factor, 1.0) / Yarn::magnitude(factor, multiplier),
        })
    }

    fn yarn_log_multiplier(&self) -> Result<Option<f32>, ModelError> {
        if !self.family.long_context_keys {
            return Ok(None);
        }
        let stated = self.keys.positive_or_none(MULTIPLIER)?;
        Ok(match self.family.latent {
            // Files of these models have a tenth of it.
            true => stated.map(|tenth| tenth / 0.1),
            false => stated,
        })
    }

    fn windowed_rope(&self, rope: &Option<Rope>) -> Result<Option<Rope>, ModelError> {
        let (WindowPattern::Some { rope: kind, .. }, Some(rope)) = (self.family.windows, rope)
        else {
            return Ok(rope.clone());
        };
        if let Some(other) = self.keys.optional_size(WINDOWED_DIMENSIONS)?
            && other != rope.dimensions
        {
            let expected = format!("{}, as in layers without a window", rope.dimensions);
            return Err(self.keys.refuse(WINDOWED_DIMENSIONS, expected, other));
        }
        let (default, magnitude) = match kind {
            WindowedRope::Same => {
                let base = self.keys.positive_or("rope.freq_base_swa", rope.base)?;
                return Ok(Some(Rope {
                    base,
                    ..rope.clone()
                }));
            }
            // The file's factor counts here, too.
            WindowedRope::Base(base) => (base, self.keys.positive_or(FACTOR, 1.0)?),
            WindowedRope::Unscaled => (rope.base, 1.0),
        };
        Ok(Some(Rope {
            pairing: rope.pairing,
            dimensions: rope.dimensions,
            base: self.keys.positive_or("rope.freq_base_swa", default)?,
            factor: 1.0,
            yarn: None,
            divisors: None,
            magnitude,
        }))
    }
}

/// All layers but the last of every `period`.
fn all_but_every(period: usize, layers: usize) -> Vec<bool> {
    (0..layers)
        .map(|layer| layer % period < period - 1)
        .collect()
}
