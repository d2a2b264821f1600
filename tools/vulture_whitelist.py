"""Names wrongly reported by vulture as unused, with the reasons. Only vulture reads this file."""

# Called by click.
_.list_commands
_.format_commands
_.get_missing_message

# Called or read by Python and its tools.
_._missing_  # of an Enum, for an unknown value
_._name_  # of an Enum member created by hand
_._value_  # likewise
_.__signature__  # read by inspect
_._repr_html_  # called by notebooks

# Element types referred to only by their codes.
_.INT8
_.INT16
_.UINT16

# Passes, named in the tables of `canonicalize`.
_.replace_cast_like
_.select_masks
_.split_biases
_.shrink_score_constants
_.fold_constants
_.fold_batch_norms
_.decompose_group_norms
_.move_attention_biases
_.fuse_attention
_.divide_by_roots
_.replace_gemms
_.decompose_patch_convs
_.fuse_rotations
_.split_attention_biases
_.move_into_tables
_.fuse_contrib
_.fuse_diffusion
_.expand_biases
_.align_products
_.bound_fills

# Run in a child process by name.
_.open_plainly
_.probe_webgpu

# Read by onnxruntime, from its SessionOptions.
_.log_severity_level
_.intra_op_num_threads
_.enable_mem_reuse
_.enable_cpu_mem_arena
_.enable_mem_pattern
_.graph_optimization_level
_.enable_profiling
_.profile_file_prefix

# Part of a type alias in a string.
_.HoldsModel
_.ExportedProgram
_.Readable
_.PrecisionPolicy
_.TorchType

# Keys of a TypedDict: keywords of `fit`.
_.validation_data
_.validation_split
_.first_epoch
_.steps_per_epoch

# Parameters of functions with another library's signature, read from `locals()`.
_.disable_shape_infer
_.force_fp16_initializers
_.force_fp16_inputs
_.use_bfloat16_as_blocked_nodes_dtype
_.persistent  # of TensorFlow's GradientTape: this one is always persistent

# Names of Keras.
_.should_cast_variables
_.KLDivergence
_.MeanAbsoluteError

# Written to JSON from the fields of a dataclass.
_.float_ops
_.largest_error

_.given_outputs  # of a Binding; users read their buffers from it

# Element types used by models, but not by the code.
_.UINT32
_.UINT64
_.COMPLEX64
_.UINT4
_.INT4
_.UINT2
_.INT2
