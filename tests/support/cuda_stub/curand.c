/* Linked by the provider, never called while a session is made. */
int stub_curand;
