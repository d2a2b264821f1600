/* Lets the TensorRT provider library load; it cannot parse anything. */
void *createNvOnnxParser_INTERNAL() { return 0; }
void *createNvOnnxParserRefitter_INTERNAL() { return 0; }
